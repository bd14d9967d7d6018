"""Declaration of the part `console`: the web console for approvers and administrators."""

from __future__ import annotations

from fumehood.core.part import Command, Options, Part

PART = Part(
    name="console",
    commands={
        "web": Command(
            "Serve the inbox and the console to a browser on this machine, until Ctrl-C.",
            "fumehood.web.command:web",
            after="serve",
        )
    },
    options=(Options("serve", "fumehood.web.command:beside", before="log_level"),),
)
