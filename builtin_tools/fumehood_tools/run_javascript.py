"""`run_javascript`: a whole JavaScript program, with files and standard input, in a container.

Only the definition stands here. It runs behind the container wall, by the guest's own program
for the executor `code:javascript`.
"""

from fumehood import CODE_OUTPUT, ToolDefinition, ToolType, argument_schema

run_javascript = ToolDefinition(
    name="run_javascript",
    version="1.0.0",
    type=ToolType.BUILTIN,
    description=(
        "Run a JavaScript program with Node.js in a sandbox and get what it printed, the value "
        "of its last expression, its exit status and the files that it wrote. Reads and writes "
        "nothing but its own working directory: no network, none of the user's files, no other "
        "process. Node's own modules are there (require('fs')), no packages. Nothing is kept "
        "for the next call, unless it is made in a session (session_id): that keeps files, not "
        "variables. Use it for JavaScript that is to be tried, and for text and JSON. Not for "
        "tables and figures (run_python), for the network, for a browser, for installing "
        "packages, or for anything that must act outside."
    ),
    parameters=argument_schema("code:javascript"),
    output_schema=CODE_OUTPUT,
    input_examples=(
        {"code": "[3, 1, 2].sort().join(' ')"},
        {
            "code": (
                "const fs = require('fs');\n"
                "const rows = JSON.parse(fs.readFileSync('in.json', 'utf8'));\n"
                "fs.writeFileSync('out.txt', String(rows.length));\nrows[0]"
            ),
            "files": [{"path": "in.json", "content": "[1, 2]"}],
        },
    ),
    category="code",
    tags=("javascript", "code"),
    executor="code:javascript",
    estimated_tokens=400,
)
