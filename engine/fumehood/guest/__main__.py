"""Start a guest: `python -I -S -B …/guest CONFIG [HANDOVER_FD]`; CONFIG is one JSON object.

HANDOVER_FD is a socket. Over it, the guest hands over the pipes of children that the host checks
out. It is omitted in containers. Runs on the guest side. The import path of the isolated
interpreter contains only the standard library and the paths in CONFIG, so nothing else can be
imported.
"""

import json
import sys


def main() -> None:
    config = json.loads(sys.argv[1])
    sys.path.extend(config["import_paths"])
    if config.get("wall") == "relay":
        from fumehood.guest.container.takeover import relay

        relay(config)
    elif config.get("wall") == "front":
        from fumehood.guest.container.front import front

        front(config)
    elif config.get("wall") == "container":
        from fumehood.guest.container import places
        from fumehood.guest.container.forks import HOOKS

        places.use(config)

        HOOKS.hold()  # before the import of the first module that registers a fork hook
        from fumehood.guest.container.supervisor import supervise as supervise_container

        supervise_container(config)
    else:
        from fumehood.guest.process.supervisor import supervise

        supervise(config, int(sys.argv[2]))


if __name__ == "__main__":
    main()
