// Runs one JavaScript program and reports its result. Guest side, in the child.
//
// Called as `node javascript.js REQUEST_FD REPLY_FD`. It waits for a request, and then does what
// `container/request` does for other languages. The claim has the form of languages/python: one
// frame (four bytes of length, big-endian, then JSON) at the very end, once the event loop is
// empty. The exit status, which this file sets, decides how the run ended. The kernel's report
// overrides the claim.
"use strict";

const fs = require("fs");
const path = require("path");
const util = require("util");
const vm = require("vm");
const { createRequire } = require("module");

const FILENAME = "main.js";
const MAX_VALUE_BYTES = 64 * 1024;
const MAX_VALUE_DEPTH = 50;
const MAX_REPR_CHARACTERS = 10000;
const MAX_MESSAGE_CHARACTERS = 2000;
const MAX_TRACEBACK_CHARACTERS = 16000;
const MAX_REPORTS = 1000;
const FAILED = 1;
const REQUEST_FAILED = 71;
// The messages of the C library.
const REASONS = {
  EACCES: "Permission denied",
  EPERM: "Operation not permitted",
  ENOENT: "No such file or directory",
  ELOOP: "Too many levels of symbolic links",
  ENXIO: "No such device or address",
  EROFS: "Read-only file system",
  EEXIST: "File exists",
  EFBIG: "File too large",
  EISDIR: "Is a directory",
  ENAMETOOLONG: "File name too long",
  ENOSPC: "No space left on device",
  ENOTDIR: "Not a directory",
};

const [requestFd, replyFd] = process.argv.slice(2, 4).map(Number);
const workspace = process.cwd();
process.argv = [process.argv[0], path.join(workspace, FILENAME)];

let claim = null;

function readExactly(fd, count) {
  const data = Buffer.alloc(count);
  for (let had = 0; had < count; ) {
    const more = fs.readSync(fd, data, had, count - had, null);
    if (more === 0) process.reallyExit(0); // the supervisor has closed the pipe
    had += more;
  }
  return data;
}

// Writes one of the caller's files: under a temporary name beside its path, then renamed to it.
function put(file) {
  const place = path.join(workspace, file.path);
  const content =
    file.content_base64 === undefined
      ? Buffer.from(file.content, "utf8")
      : Buffer.from(file.content_base64, "base64");
  fs.mkdirSync(path.dirname(place), { recursive: true });
  const beside = path.join(path.dirname(place), `.${Math.random().toString(36).slice(2)}`);
  try {
    fs.writeFileSync(beside, content, { flag: "wx", mode: 0o644 });
    fs.renameSync(beside, place);
  } catch (fault) {
    fs.rmSync(beside, { force: true });
    throw fault;
  }
}

function writeAll(fd, data) {
  for (let at = 0; at < data.length; ) at += fs.writeSync(fd, data, at, data.length - at, at);
}

function refuse(message) {
  tell({ error: { kind: "invalid", message } });
  process.reallyExit(REQUEST_FAILED);
}

// Changes to a directory of the workspace. Refuses links in its path.
function enter(directory) {
  const place = path.join(workspace, directory);
  try {
    if (fs.realpathSync(place) !== place) refuse("the working directory cannot be entered: it is a link");
    process.chdir(place);
  } catch (fault) {
    refuse(`the working directory cannot be entered: ${REASONS[fault.code] || fault.message}`);
  }
}

// Waits for the request, sets up its input, files and environment, and returns its program.
function awaitProgram() {
  const body = readExactly(requestFd, readExactly(requestFd, 4).readUInt32BE(0));
  const { arguments: wanted } = JSON.parse(body.toString("utf8"));
  const input = wanted.stdin
    ? Buffer.from(wanted.stdin, "utf8")
    : Buffer.from(wanted.stdin_base64 || "", "base64");
  if (input.length) {
    writeAll(0, input);
  } else {
    fs.closeSync(0);
    fs.openSync("/dev/null", "r"); // gets the lowest number, which is 0
  }
  for (const file of wanted.files || []) {
    try {
      put(file);
    } catch (fault) {
      refuse(`the file ${file.path} could not be written: ${REASONS[fault.code] || fault.message}`);
    }
  }
  if (wanted.working_directory) enter(wanted.working_directory);
  for (const { name, value } of wanted.env || []) process.env[name] = value;
  if (process.env.NODE_USE_ENV_PROXY === "1") require("./proxy.js");
  process.argv.push(...(wanted.argv || []));
  return wanted.code;
}

function text(value, most) {
  let shown = String(value);
  if (shown.length > most) {
    const kept = Math.floor(most / 2) - 20;
    shown = `${shown.slice(0, kept)}\n… ${shown.length - 2 * kept} characters …\n${shown.slice(-kept)}`;
  }
  // Lone surrogates, which UTF-8 cannot hold.
  return Buffer.from(shown, "utf8").toString("utf8");
}

function tell(message) {
  const body = Buffer.from(JSON.stringify(message), "utf8");
  const header = Buffer.alloc(4);
  header.writeUInt32BE(body.length);
  const frame = Buffer.concat([header, body]);
  for (let sent = 0; sent < frame.length; ) sent += fs.writeSync(replyFd, frame, sent);
}

// Whether a value consists only of JSON's types, and is neither nested too deeply nor too large.
function isPlain(value, depth, room) {
  room.left -= 1;
  if (depth < 0 || room.left < 0) return false;
  if (value === null || typeof value === "boolean") return true;
  if (typeof value === "string") return value.length <= MAX_VALUE_BYTES;
  if (typeof value === "number") {
    return Number.isFinite(value) && (!Number.isInteger(value) || Number.isSafeInteger(value));
  }
  if (Array.isArray(value)) {
    return Array.from(value).every((item) => isPlain(item, depth - 1, room));
  }
  if (typeof value !== "object") return false;
  const parent = Object.getPrototypeOf(value);
  if (parent !== Object.prototype && parent !== null) return false;
  return Reflect.ownKeys(value).every((key) => {
    const own = Object.getOwnPropertyDescriptor(value, key);
    return typeof key === "string" && "value" in own && isPlain(own.value, depth - 1, room);
  });
}

function plain(value) {
  try {
    if (!isPlain(value, MAX_VALUE_DEPTH, { left: MAX_VALUE_BYTES })) return null;
    const encoded = JSON.stringify(value);
    if (Buffer.byteLength(encoded) > MAX_VALUE_BYTES) return null;
    return JSON.parse(Buffer.from(encoded, "utf8").toString("utf8"));
  } catch {
    return null;
  }
}

function represent(value) {
  try {
    return text(
      util.inspect(value, { depth: 6, maxArrayLength: 200, maxStringLength: MAX_REPR_CHARACTERS }),
      MAX_REPR_CHARACTERS,
    );
  } catch (fault) {
    return `<inspect failed: ${fault && fault.name}>`;
  }
}

function succeed(value) {
  const has = value !== undefined;
  claim = {
    result: {
      value: has ? plain(value) : null,
      has_value: has,
      value_repr: has ? represent(value) : null,
    },
  };
}

function fail(error) {
  let name = "Error";
  let message = "";
  let stack = "";
  let line = null;
  try {
    if (error instanceof Error || util.types.isNativeError(error)) {
      name = String(error.name);
      message = String(error.message);
      stack = String(error.stack || "");
    } else {
      name = typeof error;
      message = represent(error);
      stack = `Uncaught ${message}`;
    }
    // The frames below those of the program belong to this file and to Node.
    const lines = stack.split("\n");
    const kept = lines.filter(
      (each) => !/^\s+at /.test(each) || (each.includes(FILENAME) && !each.includes(__filename)),
    );
    stack = kept.join("\n");
    const found = new RegExp(`${FILENAME.replace(".", "\\.")}:(\\d+)`).exec(stack);
    line = found ? Number(found[1]) : null;
  } catch {
    message = "an error that fails to say more";
    stack = message;
  }
  const shown = text(stack || `${name}: ${message}`, MAX_TRACEBACK_CHARACTERS);
  claim = {
    error: {
      kind: "exception",
      message: text(`${name}: ${message}`, MAX_MESSAGE_CHARACTERS),
      errno: error && error.code === "ENOSPC" ? 28 : error && error.code === "EMFILE" ? 24 : null,
      exception: {
        type: text(name, 100),
        message: text(message, MAX_MESSAGE_CHARACTERS),
        line,
        traceback: shown,
      },
    },
  };
  try {
    fs.writeSync(2, shown.endsWith("\n") ? shown : `${shown}\n`);
  } catch {
    // The stream is closed.
  }
  process.exitCode = FAILED;
}

// Node loads and compiles what every program needs at its first use, so use it before the request.
new vm.Script("[1]", { filename: FILENAME }).runInThisContext();
plain(util.inspect([1]));
const code = awaitProgram();
fs.closeSync(requestFd);

let reports = 0;
globalThis.progress = function progress(percent, message = "") {
  reports += 1;
  if (reports > MAX_REPORTS || !Number.isFinite(Number(percent))) return;
  try {
    const words = text(message, MAX_MESSAGE_CHARACTERS).slice(0, 200);
    tell({ progress: { percent: Number(percent), message: words } });
  } catch {
    // The program has closed the pipe.
  }
};

// As in a CommonJS module.
const place = path.join(workspace, FILENAME);
globalThis.require = createRequire(place);
globalThis.module = { exports: {}, filename: place, id: "." };
globalThis.exports = globalThis.module.exports;
globalThis.__filename = place;
globalThis.__dirname = workspace;

process.on("uncaughtException", (error) => {
  fail(error);
  process.exit(FAILED);
});
process.on("exit", (status) => {
  if (status === 0 && claim === null) claim = { result: null };
  if (claim === null || (status !== 0 && claim.result !== undefined)) return;
  try {
    tell(claim);
  } catch {
    // The program has closed the pipe, so nothing is reported.
  }
});

function run() {
  const options = { filename: FILENAME, importModuleDynamically: (name) => import(name) };
  try {
    return new vm.Script(code, options).runInThisContext();
  } catch (error) {
    const isAwait =
      error instanceof SyntaxError && /await is only valid|Unexpected reserved word/.test(error.message);
    if (!isAwait) throw error;
    // Top-level `await`: run the program as the body of an async function, on the same lines.
    return new vm.Script(`(async () => {${code}\n})()`, options).runInThisContext();
  }
}

try {
  const value = run();
  if (util.types.isPromise(value)) {
    value.then(succeed, (error) => {
      fail(error);
    });
  } else {
    succeed(value);
  }
} catch (error) {
  fail(error);
}
