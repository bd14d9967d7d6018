"""What tools that run code take besides the code: standard input and files."""

STDIN = {
    "type": "string",
    "description": "What the program reads from standard input; absent: nothing.",
}

FILES = {
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
}
