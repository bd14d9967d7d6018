// Makes Node's `fetch`, `http` and `https` use the gateway, because Node 18 ignores the variables
// that name a proxy. Guest side; loaded by `javascript.js`, and through NODE_OPTIONS by all other
// Node programs of a run with network. `undici` is Debian's package, which Node's `fetch` copies.
"use strict";

const http = require("http");
const https = require("https");
const tls = require("tls");

const UNDICI = "/usr/share/nodejs/undici";
const proxy = new URL(process.env.HTTPS_PROXY);
const direct = new Set((process.env.NO_PROXY || "").split(","));
const ca = [
  ...tls.rootCertificates,
  require("fs").readFileSync(process.env.NODE_EXTRA_CA_CERTS, "utf8"),
];

function tunnel(options, callback) {
  const path = `${options.host}:${options.port}`;
  const ask = http.request({
    host: proxy.hostname, port: proxy.port, method: "CONNECT", path,
    headers: { host: path }, agent: false,
  });
  ask.once("error", callback);
  ask.once("connect", (answer, socket) => {
    if (answer.statusCode === 200) return callback(null, socket);
    socket.destroy();
    return callback(new Error(`The gateway refused ${path} with ${answer.statusCode}`));
  });
  ask.end();
}

class HttpAgent extends http.Agent {
  createConnection(options, callback) {
    if (direct.has(options.host)) return super.createConnection(options, callback);
    return void tunnel(options, callback);
  }
}

class HttpsAgent extends https.Agent {
  createConnection(options, callback) {
    if (direct.has(options.host)) return super.createConnection(options, callback);
    const servername = options.servername || options.host;
    return void tunnel(options, (error, socket) =>
      error ? callback(error) : callback(null, tls.connect({ ca, ...options, socket, servername })),
    );
  }
}

http.globalAgent = new HttpAgent({ keepAlive: true });
https.globalAgent = new HttpsAgent({ keepAlive: true });

try {
  const { Agent, Dispatcher, ProxyAgent, setGlobalDispatcher } = require(UNDICI);
  const near = new Agent();
  const far = new ProxyAgent({ uri: proxy.href, requestTls: { ca } });
  setGlobalDispatcher(
    new (class extends Dispatcher {
      dispatch(options, handler) {
        const { hostname } = new URL(options.origin);
        return (direct.has(hostname) ? near : far).dispatch(options, handler);
      }
    })(),
  );
} catch {
  // An image may lack `undici`: then `fetch` has no network.
}
