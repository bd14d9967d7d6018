// Calls a daemon over TCP with openapi-fetch and the types that openapi-typescript made.
// Usage: node call.js URL TOKEN
import createClient from "openapi-fetch";
import type { paths } from "./callers.js";
import type { paths as ControlPaths } from "./control.js";

declare const process: { argv: string[] };
const [url, token] = process.argv.slice(2) as [string, string];
const client = createClient<paths>({ baseUrl: url, headers: { authorization: `Bearer ${token}` } });

function check(isTrue: boolean, words: string): void {
    if (!isTrue) throw new Error(words);
}

const path = { name: "calculator" };
const answered = await client.POST("/v1/tools/{name}/call", {
    params: { path },
    body: { arguments: { expression: "6 * 7" } }, // every option may be left out
});
const result = answered.data;
check(result?.success === true && result.data["value"] === 42, JSON.stringify(answered));

const refused = await client.POST("/v1/tools/{name}/call", {
    params: { path },
    body: { arguments: { expression: "1 / 0" }, options: { max_length: 100 } },
});
const code: string | undefined = refused.error?.error.code;
check(refused.data === undefined && code === "EXECUTION_ERROR", JSON.stringify(refused.error));

const tools = await client.GET("/v1/tools", { params: { query: { limit: 1 } } });
check(tools.response.status === 200, JSON.stringify(tools.error));

const made = await client.POST("/v1/sessions", { body: { memory_mb: 128 } });
const session = made.data?.data.session.id ?? "";
const file = { session_id: session, path: "d/e/a b.txt" };
const written = await client.PUT("/v1/sessions/{session_id}/files/{path}", {
    params: { path: file },
    body: "some text",
    bodySerializer: (text) => text,
    headers: { "content-type": "application/octet-stream" },
});
check(written.data?.data.path === "d/e/a b.txt", JSON.stringify(written.error));
const read = await client.GET("/v1/sessions/{session_id}/files/{path}", {
    params: { path: file },
    parseAs: "text",
});
check(read.data === "some text", JSON.stringify(read.error));

// Of the control socket, the types alone.
type Change = NonNullable<
    ControlPaths["/v1/agents/{agent_id}"]["patch"]["requestBody"]
>["content"]["application/json"];
const change: Change = { is_enabled: false };
check(change.is_enabled === false, "");
console.log("all calls were answered as documented");
