"""`run_shell`: a bash command, with files and standard input, in a container.

Only the definition stands here. It runs behind the container wall, by the guest's own program
for the executor `code:shell`.
"""

from fumehood import SHELL_OUTPUT, ToolDefinition, ToolType, argument_schema

run_shell = ToolDefinition(
    name="run_shell",
    version="1.0.0",
    type=ToolType.BUILTIN,
    description=(
        "Run a bash command or script in a sandbox and get what it printed, its exit status and "
        "the files that it wrote. It has the usual command-line tools (coreutils, grep, sed, "
        "gawk, jq, git and others) and reads and writes nothing but its own working directory: "
        "no network, none of the user's files, no other process. There is no terminal: nothing "
        "can ask a question, and editors and pagers do not work. Nothing is kept for the next "
        "call, unless it is made in a session (session_id): that keeps files, not variables or "
        "the current directory. An exit status other than 0 is an error that shows the output. "
        "Use it to look at, filter and convert files. Not for computing (run_python), for the "
        "network, for installing packages, or for anything that must act outside."
    ),
    parameters=argument_schema("code:shell"),
    output_schema=SHELL_OUTPUT,
    input_examples=(
        {"command": "sort -u | head -n 3", "stdin": "b\na\nb\n"},
        {
            "command": "grep -c ERROR app.log",
            "files": [{"path": "app.log", "content": "ok\nERROR full\n"}],
        },
    ),
    category="code",
    tags=("shell", "code"),
    executor="code:shell",
    estimated_tokens=400,
)
