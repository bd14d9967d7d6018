"""Fuzz a target: `python -m fuzz.one NAME SECONDS PACKAGES`. Its corpus is kept with the packages.

It ends with the status of libFuzzer: 77 if the target failed; the input is then beside the corpus.
"""

from __future__ import annotations

import sys
from pathlib import Path

# After the engine's own libraries, of which it may have other versions.
sys.path.append(sys.argv[3])

import atheris

with atheris.instrument_imports(include=["fumehood", "h11"]):
    from fuzz.targets import TARGETS


def main() -> None:
    """Run libFuzzer, which does not return."""
    name, seconds = sys.argv[1:3]
    corpus = Path(sys.argv[3]) / "corpus" / name
    target, examples = TARGETS[name]
    corpus.mkdir(parents=True, exist_ok=True)
    for number, example in enumerate(examples):
        (corpus / f"example-{number}").write_bytes(example)
    flags = [f"-max_total_time={seconds}", "-max_len=2048", "-timeout=10", "-rss_limit_mb=2048"]
    flags += ["-print_final_stats=1", f"-artifact_prefix={corpus.parent}/{name}-"]
    atheris.Setup([sys.argv[0], str(corpus), *flags], target)
    atheris.Fuzz()


main()
