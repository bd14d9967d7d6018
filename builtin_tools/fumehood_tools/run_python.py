"""`run_python`: a whole Python program, with files and standard input, in a container.

Only the definition stands here. It runs behind the container wall, by the guest's own program
for the executor `code:python`.
"""

from fumehood import CODE_OUTPUT, ToolDefinition, ToolType, argument_schema

run_python = ToolDefinition(
    name="run_python",
    version="1.0.0",
    type=ToolType.BUILTIN,
    description=(
        "Run a Python program in a sandbox and get what it printed, the value of its last "
        "expression, its exit status, the files that it wrote and the figures that it drew. Has "
        "the whole standard library, NumPy, pandas and Matplotlib; open figures come back as PNG "
        "without being saved, and tables as records. Reads and writes nothing but its own "
        "working directory: no network, none of the user's files, no other process. Files can be "
        "sent in and come back. Nothing is kept for the next call, unless it is made in a "
        "session (session_id): that keeps variables and files. Use it for computing, data, "
        "plots, parsing, converting and generating files, and for code that "
        "run_restricted_python refuses. Not for single sums (calculator), for the network, for "
        "installing packages, or for anything that must act outside. Where "
        "many calls of other tools are needed, name those in tools and call them in the program: "
        "their results stay there."
    ),
    parameters=argument_schema("code:python"),
    output_schema=CODE_OUTPUT,
    input_examples=(
        {"code": "import statistics\nstatistics.median([3, 1, 2])"},
        {
            "code": (
                "import csv\nwith open('in.csv') as f:\n    rows = list(csv.reader(f))\n"
                "with open('out.txt', 'w') as f:\n    f.write(str(len(rows)))\nrows[0]"
            ),
            "files": [{"path": "in.csv", "content": "name,age\nAnn,31\n"}],
        },
    ),
    category="code",
    tags=("python", "code"),
    executor="code:python",
    estimated_tokens=400,
)
