"""`run_python`: a whole Python program, with files and standard input, in a container.

Only the definition stands here. It runs behind the container wall, by the guest's own program
for the executor `code:python`.
"""

from fumehood import CODE_OUTPUT, ToolDefinition, ToolType

run_python = ToolDefinition(
    name="run_python",
    version="1.0.0",
    type=ToolType.BUILTIN,
    description=(
        "Run a Python program in a sandbox and get what it printed, the value of its last "
        "expression, its exit status and the files that it wrote. Reads and writes nothing but "
        "its own temporary working directory: no network, none of the user's files, no other "
        "process. The whole standard library is there; files can be sent in and come back; "
        "nothing is kept for the next call. Use it for computing, parsing, converting and "
        "generating files, and for code that run_restricted_python refuses. Not for single "
        "sums (calculator), for the network, for installing packages, or for anything that must "
        "last or act outside."
    ),
    parameters={
        "type": "object",
        "additionalProperties": False,
        "required": ["code"],
        "properties": {
            "code": {
                "type": "string",
                "minLength": 1,
                "maxLength": 5_242_880,
                "description": "The program. Print results, or end with an expression.",
            },
            "stdin": {
                "type": "string",
                "description": "What the program reads from standard input; absent: nothing.",
            },
            "files": {
                "type": "array",
                "maxItems": 100,
                "description": "Files to put into the working directory before it starts.",
                "items": {
                    "type": "object",
                    "additionalProperties": False,
                    "required": ["path"],
                    "properties": {
                        "path": {
                            "type": "string",
                            "minLength": 1,
                            "maxLength": 4096,
                            "description": "Relative path, such as 'data/input.csv'.",
                        },
                        "content": {"type": "string", "description": "The content as text."},
                        "content_base64": {
                            "type": "string",
                            "description": "Or the content as base64; one of the two.",
                        },
                    },
                },
            },
        },
    },
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
