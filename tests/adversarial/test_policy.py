"""The policy's boundary: calls that try to evade a rule, and policy files that are bombs.

Each attack on a rule is a call that the rule must stop; its twin is the nearest call that the rule
must let through, and the control is the same attack without the rule. One process with hard limits
on CPU time and memory reads the files.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fumehood.policy.model import CallFacts, Verdict
from fumehood.shell.reading import runs
from fumehood.shell.runners import OPAQUE, WRAPPERS
from support.attacks import Harm
from support.policies import decide, facts, rule, tool, verdict

ALLOW, ASK, DENY = Verdict.ALLOW, Verdict.ASK, Verdict.DENY

ONLY_OUT = rule("deny", when=[{"argument": "/path", "not": {"path_inside": "/workspace/out"}}])
NO_SECRETS = rule("deny", when=[{"argument": "/path", "path_inside": "/workspace/secret"}])
ONLY_HOST = rule("deny", when=[{"argument": "/url", "not": {"host_in": ["example.org"]}}])
NO_HOST = rule("deny", when=[{"argument": "/url", "host_in": ["*.internal.example"]}])
SMALL = rule("deny", when=[{"argument": "/amount", "not": {"max": 100}}])
NOT_TO = rule("deny", when=[{"argument": "/to/*", "glob": "*@evil.example"}])
ONLY_TO = rule("deny", when=[{"argument": "/to/*", "not": {"glob": "*@example.org"}}])


@dataclass(frozen=True)
class RuleAttack:
    """Arguments that must not evade a rule, and those that it must let through."""

    name: str
    harm: Harm
    stops: dict[str, Any]
    arguments: dict[str, Any]
    twin: dict[str, Any]
    source: str = ""


ATTACKS = [
    RuleAttack("dot segments", Harm.INTEGRITY, ONLY_OUT, {"path": "/workspace/out/../notes"},
               {"path": "/workspace/out/a/../notes"}, "CWE-22"),
    RuleAttack("relative", Harm.INTEGRITY, ONLY_OUT, {"path": "../etc/passwd"}, {"path": "out/a"}),
    RuleAttack("prefix of a name", Harm.INTEGRITY, ONLY_OUT, {"path": "/workspace/outer/a"},
               {"path": "/workspace/out/er/a"}, "CVE-2025-53110"),
    RuleAttack("NUL", Harm.INTEGRITY, ONLY_OUT, {"path": "/workspace/out/a\0/../../b"},
               {"path": "/workspace/out/a"}, "CWE-158"),
    RuleAttack("doubled slashes", Harm.INTERNAL_READ, NO_SECRETS, {"path": "//workspace//secret/a"},
               {"path": "//workspace//public/a"}),
    RuleAttack("dot segments into secret", Harm.INTERNAL_READ, NO_SECRETS,
               {"path": "public/../secret/a"}, {"path": "secret/../public/a"}),
    RuleAttack("argument omitted", Harm.INTEGRITY, ONLY_OUT, {}, {"path": "out/a"}),
    RuleAttack("list instead of text", Harm.INTEGRITY, ONLY_OUT, {"path": ["/etc/passwd"]},
               {"path": "out/a"}),
    RuleAttack("user information", Harm.EXFIL, ONLY_HOST,
               {"url": "https://example.org@evil.example/"},
               {"url": "https://example.org/@evil.example/"}, "CWE-918"),
    RuleAttack("backslash", Harm.EXFIL, ONLY_HOST, {"url": "https://evil.example\\@example.org/"},
               {"url": "https://example.org/%5c@"}, "Orange Tsai, A New Era of SSRF (2017)"),
    RuleAttack("suffix", Harm.EXFIL, ONLY_HOST, {"url": "https://example.org.evil.example/"},
               {"url": "https://EXAMPLE.org.:443/"}),
    RuleAttack("fragment", Harm.EXFIL, ONLY_HOST, {"url": "https://evil.example/#example.org"},
               {"url": "https://example.org/#evil.example"}),
    RuleAttack("control character", Harm.EXFIL, ONLY_HOST,
               {"url": "https://example.org\t.evil.example/"}, {"url": "https://example.org/"}),
    RuleAttack("full-width letter", Harm.LATERAL, NO_HOST,
               {"url": "https://a.\uff49nternal.example/"},
               {"url": "https://a.public.example/"}, "IDNA maps it to internal"),
    RuleAttack("ideographic full stop", Harm.LATERAL, NO_HOST,
               {"url": "https://a\u3002internal.example/"},
               {"url": "https://internal.example.org/"}),
    RuleAttack("upper case and port", Harm.LATERAL, NO_HOST,
               {"url": "HTTP://DB.Internal.Example.:5432"}, {"url": "http://internal.example:80"}),
    RuleAttack("number as text", Harm.INTEGRITY, SMALL, {"amount": "1000000"}, {"amount": 100}),
    RuleAttack("boolean as number", Harm.INTEGRITY, SMALL, {"amount": True}, {"amount": 1}),
    RuleAttack("not a number", Harm.INTEGRITY, SMALL, {"amount": float("nan")}, {"amount": -1.5}),
    RuleAttack("integer beyond doubles", Harm.INTEGRITY, SMALL, {"amount": 10**4000},
               {"amount": -(10**4000)}),
    RuleAttack("last of many", Harm.EXFIL, NOT_TO, {"to": ["a@b.example"] * 999 + ["x@evil.example"]},
               {"to": ["a@b.example"] * 1000}),
    RuleAttack("beyond the inspected list entries", Harm.EXFIL, NOT_TO,
               {"to": ["a@b.example"] * 1001 + ["x@evil.example"]}, {"to": ["a@b.example"]}),
    RuleAttack("one good among bad", Harm.EXFIL, ONLY_TO, {"to": ["a@example.org", "x@evil.example"]},
               {"to": ["a@example.org", "b@example.org"]}),
    RuleAttack("object instead of list", Harm.EXFIL, NOT_TO, {"to": {"0": "x@evil.example"}},
               {"to": {"0": "x@good.example"}}),
]  # fmt: skip


@pytest.mark.row("A1")
@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_attack_arguments_do_not_evade_deny_rule(attack: RuleAttack) -> None:
    assert verdict(facts(None, attack.arguments), attack.stops) is DENY
    assert verdict(facts(None, attack.twin), attack.stops) is ALLOW
    assert verdict(facts(None, attack.arguments)) is ALLOW  # control: without the rule


def _turned(stops: dict[str, Any]) -> dict[str, Any]:
    """The same condition, inverted into a rule that allows a dangerous tool."""
    (condition,) = stops["when"]
    inner = {name: value for name, value in condition.items() if name != "argument"}
    turned = inner.get("not", {"not": inner})
    when = [{"argument": condition["argument"], **turned}]
    return rule("allow", tools=["delete_all"], when=when)


@pytest.mark.row("A1")
@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_attack_arguments_do_not_satisfy_allow_rule(attack: RuleAttack) -> None:
    dangerous = tool("delete_all", dangerous=True)
    opens = _turned(attack.stops)
    assert verdict(facts(dangerous, attack.arguments), opens) is ASK
    assert verdict(facts(dangerous, attack.twin), opens) is ALLOW
    always = rule("allow", tools=["delete_all"])
    assert verdict(facts(dangerous, attack.arguments), always) is ALLOW  # control: no condition


RUNS = rule("deny", runs=["rm", "git push", "find -delete"])
SHELL = tool("shell", properties={"command": {"type": "string"}, "argv": {"type": "array"}})

RUNNING = {
    "rm -rf build": "echo rm -rf build",
    "/bin/rm x": "ls /bin/rm",
    "./tools/rm x": "rmdir x",
    "r\\m x": 'grep "rm -rf" file',
    "r''m x": "grep 'rm' file",
    '"rm" x': 'echo "rm x"',
    "set -euo pipefail; rm x": "set -euo pipefail; ls; set -- $X",
    "$'rm' x": "echo $'\\x72m'",
    "echo $'\\''; rm x #'": "echo $'\\'; rm x #'",
    "cd x && rm -r .": "cd rm && ls",
    "false || rm x": "make || echo rm",
    "ls; rm x": "ls # rm x",
    "ls\nrm x": "ls \\\n  rm",
    "ls & rm x": "ls rm &",
    "ls | xargs rm": "ls | xargs -0 grep rm",
    "echo x |& rm": "echo rm |& cat",
    "(rm x)": "(ls rm)",
    "{ rm x; }": "{ echo rm; }",
    "! rm x": "! grep rm x",
    "if true; then rm x; fi": "if [ -d rm ]; then ls; fi",
    "for i in a; do rm $i; done": 'for i in rm; do echo "$i"; done',
    "while read f; do rm $f; done < list": "while read rm; do ls; done < rm",
    "case a in rm) ls;; *) rm x;; esac": "case rm in rm) ls;; esac",
    "f() { rm x; }; f": "f() { echo rm; }; f",
    "A=1 rm x": "A=rm ls",
    "> f rm x": "ls > rm",
    "2>&1 rm x": "ls 2> rm",
    "echo $(rm x)": "echo '$(rm x)'",
    'echo "$(rm x)"': 'echo "\\$(rm x)"',
    "echo `rm x`": "echo '`rm x`'",
    "diff <(rm x) y": "diff rm y",
    "X=${Y:-$(rm x)}": "X=${Y:-rm}",
    "echo $((1 + $(rm x)))": "echo $((1 + rm))",
    "cat <<E\n$(rm x)\nE": "cat <<'E'\n$(rm x)\nE",
    "cat <<E\nx\nE\nrm x": "cat <<E\nrm x\nE\nls",
    'git commit -m "$(rm x)"': "git commit -m \"$(cat <<'E'\nrm `x`\nE\n)\"",
    "bash -c 'rm x'": "bash -c 'echo rm'",
    "sh -ec 'ls && rm x'": "sh -ec 'ls rm'",
    "bash -o pipefail -c 'rm x'": "bash -o pipefail -c ls",
    "bash -c 'sh -c \"rm x\"'": "bash -c 'sh -c \"echo rm\"'",
    "sudo rm x": "sudo ls rm",
    "sudo -u root -- rm x": "sudo -u rm ls",
    "env A=1 rm x": "env A=rm ls",
    "env -u A rm x": "env -u rm ls",
    "nice -n 5 rm x": "nice -n 5 ls rm",
    "timeout -k 1 5 rm x": "timeout -k 1 5 ls rm",
    "timeout --signal KILL 5 rm x": "timeout --signal=KILL 5 ls rm",
    "nohup rm x": "nohup ls rm",
    "command rm x": "command -v rm",
    "exec rm x": "exec ls rm",
    "time -p rm x": "time ls rm",
    "time a=b rm x": "time a=rm ls",
    "sudo nice env A=b timeout 5 rm x": "sudo nice env A=b timeout 5 ls rm",
    "find . -name '*.o' -exec rm {} +": "find . -name rm -exec ls {} +",
    "find . -delete": "find . -name delete",
    "find . -exec env -u + rm {} \\;": "find . -exec env -u + ls {} \\;",
    "find . -exec git -C + push \\;": "find . -exec ls {} + -name push",
    "find . -execdir sh -c 'rm x' \\;": "find . -execdir sh -c 'ls rm' \\;",
    "git push": "git pushd",
    "git -C x push --force": "git -C x status push",
    "git --git-dir=x push": "git log push",
    "/usr/bin/git -c a=b push": "git stash push",
    "busybox rm x": "busybox ls rm",
    "jobs -x rm x": "jobs -l",
    "xargs -J % rm %": "xargs -J % ls %",
    "env -P /bin rm x": "env -P /bin ls",
    "gtimeout 5 rm x": "gtimeout 5 ls rm",
    "gxargs -I{} rm {}": "gxargs -I{} ls {} rm",
    "gfind . -exec rm {} +": "gfind . -name rm",
    "logsave f rm x": "logsave rm ls",
}  # fmt: skip
"""Commands that run one of the programs, each with the nearest command that does not."""

UNREADABLE = [
    "$X x", '"$X" x', "$(echo rm) x", "`echo rm` x", "r? x", "*/rm x", "{rm,-rf,x}", "r{m,n} x", "~x",
    "eval rm x", "source x", ". x", "echo rm x | bash", "bash x.sh", "bash <<E\nrm x\nE", 'sh -c "$X"',
    "bash -c", "trap 'rm x' EXIT", "alias ls=rm", "zsh -c 'rm x'", "su -c 'rm x'", "sudo -i",
    "sudo -s", "env -S 'rm x'", "env --split-string='rm x'", "parallel rm ::: x", "coproc rm x",
    "git $X", 'git "$X"', "echo push | xargs git", "git $(echo push)", "find $X", 'find . "$X"',
    "find . -exec {} +", "xargs -I{} {} x", "xargs -I X sh -c 'X'", "sudo $X rm", "timeout $X rm",
    "r\\\nm x", "rm\r", "echo x\0rm", "'", '"', "$(", "((", "{ rm", "if rm", "cat <<E",
    "time ! rm x", "[ a && rm x ]", "[ a\nrm x ]", 'echo "${X@P}"', "${ rm x; }",
    "`r\\\\m x`", "cat <<E\n \\\nE\n'\nE\nrm x\n'", "cat <<E'F'\nE\nEF\nrm x", "echo >&2'$(rm)'x",
    "echo \"${X:-'$(rm x)'}\"", "cat <<E\n${X:-'$(rm x)'}\nE", "echo $(( '$(rm x)' ))", "a['$(rm x)']=1",
    "a=2\n\\rm x", "ls\n\\rm x", "a=(a)echo rm", "<<<'x'\\;a rm",
    "timeout 1 > x rm y", "{rm,x}\necho { rm; }", "((rm) )", "echo $((rm) )",
    "$'\\x72m' x", "$'r\\155\\0x' y", "$'\\x{72}m' x", "bash -c $'echo \\#; rm x'", "bash -c -- '-x; rm y' 'ls'",
    "bash -c - '+x; rm y' ls", "sh -c \"echo \\$'\\\\'; rm x #'\"", "sh -c '((rm))'", "dash -c '[[ a || rm x ]]'",
    "sh -c 'ls &>x rm y'", "sh -c 'echo $[1 ;rm x; ]'", "X='5 rm'; nice -n $X ls", "exec -a $X ls", "env -u {A,rm} ls",
    "sudo -u [ar]* ls", "find [-r]* \\;", "chroot / <<< 'rm x'", "strace -o '|rm x' ls", "chrt -i rm x",
    "env {a}>f rm x", "git {a}<f push", "nice {a}<<<x rm y", "sudo {a[0]}>f rm x", "git {a}<<E push\nE", "echo ${x@P }",
    "echo $'\\\\'; rm x; echo 'a'", "echo $'a\\\\' && rm x #'",
    "x=$ rm", "x=$\nrm x", "x=$ \"rm\" x", "x+=$ git push", "if x=$ rm; then ls; fi", "<$ rm x", "bash -c 'x=$ rm'",
    "ls >& -rm x", "x=a <& \\\n-rm x", "git >&- push", "git 2>&-push", "xargs <&- rm", "git <<E push\nE", "find <<E . -delete\nE", "[[ a>(rm) ]]", "[[ -n $x && (b<(rm x)) ]]",
    "fd -e o -x rm", "fdfind . -HX rm", "fd --exec=rm", "fd $X",
    "touch rm; r[m] =x", "echo $(cat <<E\n$(\nErm x)\nE\n)", "echo $(cat <<-E\n$(\n\tErm x)\n\tE\n)",
    "echo `cat <<'E'\n`a`$(rm x)\nE\n`", '$"rm" x', 'r$"m" x', '"r"$"m" x', 'git p$"ush"', "set -Ho history\n: rm x\n!:1 x", "set -o history -o histexpand\n: rm x\n^: ^^",
    "set $X\n: rm x\n!:1 x", "a" * 20_000, "(" * 5_000, "$(" * 5_000, "a|" * 900, "a=(" * 900, "f()" * 900, "))" * 4_000,
    "`" * 9_001, "{ " * 8_000, "if a; then " * 1_000, "<<E " * 400, "a;" * 8_000, "nice " * 20 + "rm x",
    "sh -c ls; " * 30, "{\U00031860", "\ud800(",
]  # fmt: skip
"""Commands that cannot be analysed, and therefore count as running one of the programs."""


EVALUATED = {
    # bash runs a text that is the value of a variable, or takes a word for another program
    "BASH_CMDS[ls]=/bin/rm; ls x": "echo ${BASH_CMDS[ls]}",
    "declare -A BASH_CMDS=([ls]=/bin/rm); ls x": "declare -A m=([ls]=/bin/rm); ls x",
    'declare "BASH_CMDS[ls]=/bin/rm"; ls x': 'declare "m[ls]=/bin/rm"; ls x',
    "read BASH_CMDS[ls] <<< /bin/rm; ls x": "read -r line <<< BASH_CMDS; ls x",
    "read -ad BASH_CMDS[ls] <<< /bin/rm": "read -ra words <<< /bin/rm",
    "printf -vBASH_CMDS[ls] /bin/rm; ls x": "printf -vx /bin/rm; ls x",
    "printf -v BASH_CMDS[ls] /bin/rm; ls x": "printf %s BASH_CMDS[ls] /bin/rm",
    'x=BASH_CMDS[ls]; read "$x" <<< /bin/rm': 'x=BASH_CMDS[ls]; read -p "$x" y',
    ": ${BASH_CMDS[ls]:=/bin/rm}; ls x": ": ${BASH_CMDS[ls]:-/bin/rm}; ls x",
    "x=BASH_CMDS; : ${!x:=/bin/rm}": "x=BASH_CMDS; echo ${!x}",
    "declare -n r=BASH_CMDS; r[ls]=/bin/rm; ls": "declare -r r=BASH_CMDS; ls",
    "shopt -s expand_aliases\nBASH_ALIASES[ls]='rm x'\nls": "shopt -s nullglob\nls *",
    "BASH_ENV='$(rm x)' bash -c :": "BASH_ENV= bash -c :",
    "export BASH_ENV='$(rm x)'; bash -c :": "export A='$(rm x)'; bash -c :",
    "export BASH_ENV; for BASH_ENV in '$(rm x)'; do bash -c :; done": "for A in '$(rm x)'; do bash -c :; done",
    "env -i BASH_ENV='$(rm x)' bash -c :": "env -i NODE_ENV='$(rm x)' bash -c :",
    "env 'BASH_FUNC_ls%%=() { rm x; }' bash -c ls": "env 'FUNC_ls=() { rm x; }' bash -c ls",
    "systemd-run -E BASH_ENV=x bash -c :": "systemd-run -E A=x bash -c :",
    "ENV='$(rm x)' sh -ic :": "ENV=production sh -ic :",
    "PS4='$(rm x)'; set -x; ls": "PS4='+ '; set -x; ls",
    "PS4='\\044(rm x)'; set -x; ls": "PS4='> (rm x)'; set -x; ls",
    "PROMPT_COMMAND='rm x'": "echo $PROMPT_COMMAND",
    "set -k; git a=b push": "set -e; git a=b stash push",
    "set -o keyword\nbash -c : BASH_ENV='$(rm x)'": "set -o pipefail\nbash -c : BASH_ENV='$(rm x)'",
    "bash -kc 'git a=b push'": "bash -ec 'git a=b stash push'",
    "shopt -so history histexpand\n: rm x\n!:1 x": "shopt -so pipefail errexit\n: rm x",
    "set -o histexpand -o history\n: rm x\n!:1 x": "set +H\n: rm x",
    "bash --rcfile /dev/stdin -ic : <<< 'rm x'": "bash --norc -ic : <<< 'rm x'",
    "bash -rcfile /dev/stdin -ic : <<< 'rm x'": "bash -ic : <<< 'rm x'",
    "bash -O expand_aliases -c ls": "bash -O nullglob -c ls",
    "x='a[$(rm x)]'; echo $((x))": "x='a[$(rm x)]'; echo $x",
    "x='a[`rm x`]'; ((x))": "x='a[`rm x`]'; (ls)",
    'x="a[\\$(rm x)]"; [[ x -eq 1 ]]': 'x="a[\\$(rm x)]"; [[ $x == 1 ]]',
    "x=$'a[\\x24(rm x)]'; echo ${!x}": "x=$'a[\\x24(rm x)]'; echo ${x}",
    "x='a[$''(rm x)]'; let y=x": "x='a[$''(rm x)]'; ls",
    "x='a[$(rm x)]'; echo ${PATH:x}": "x='a[$(rm x)]'; echo ${PATH:-x}",
    "x='a[$(rm x)]'; b[x]=1": "x='a[$(rm x)]'; b=1",
    "x='a[$(rm x)]'; y=([x]=1)": "x='a[$(rm x)]'; y=(x 1)",
    "x='a[$(rm x)]'; RANDOM=x": "x='a[$(rm x)]'; OTHER=x",
    "x='a[$(rm x)]'; declare -i y=x": "x='a[$(rm x)]'; declare -r y=x",
    "x='a[$(rm x)]'; for ((i=x; i<0; i++)); do ls; done": "x='a[$(rm x)]'; for i in x; do ls; done",
    "x='a[$(rm x)]'; ls & wait -n -p \"$x\"": "x='a[$(rm x)]'; ls & wait 1",
    "read x <<'E'\na[$(rm x)]\nE\necho $((x))": "cat <<'E'\na[$(rm x)]\nE\necho $x",
    "test -v 'a[$(rm x)]'": "test -n 'a[$(rm x)]'",
    "[ -v 'a[$(rm x)]' ]": "[ -n 'a[$(rm x)]' ]",
    "x='a[$(rm x)]'; [ -v \"$x\" ]": "x='a[$(rm x)]'; [ -f \"$y\" ]",
    "[[ -v 'a[$(rm x)]' ]]": "[[ -n 'a[$(rm x)]' ]]",
    "printf -v 'a[$(rm x)]' 1": "printf %s 'a[$(rm x)]' 1",
    "bash -c 'echo $(($1))' - 'a[$(rm x)]'": "bash -c 'echo $(date) $((1))' - 'a[x]'",
    "env x='a[$(rm x)]' bash -c 'echo $((x))'": "env x='a[$(rm x)]' bash -c 'echo $x'",
    "[ a = b ]x || rm": "[ a = b ] || echo rm",
    # one word of quotes becomes several, or a word becomes an option
    "set -- v rm x; y=@; env \"A=${!y}\" ls": "set -- v rm x; y=@; env \"A=${y}\" ls",
    "a=(b push); y='a[@]'; git --x=\"${!y}\"": "a=(b push); y='a[@]'; git --x=\"${y}\"",
    "set -- b push; y=@; git --x=\"${!y:1}\"": "set -- b push; y=@; git --x=\"${y:1}\"",
    "set -- . -exec rm {} \\;; y=@; find \"./${!y}\"": "set -- . -exec rm {} \\;; y=@; find \"./${y}\"",
    "HOME=--git-dir=; git ~/x push": "HOME=/home/me; git ~/x push",
    "OLDPWD=--git-dir=; git ~-/x push": "OLDPWD=~/y; git ~-/x push",
    "for PWD in --git-dir=; do git ~+/x push; done": "for A in --git-dir=; do git ~+/x push; done",
    "y=--x=; HOME=$y; git ~/x push": "HOME=$(mktemp -d); git x push",
    "y=--x=; env HOME=\"$y\" bash -c 'git ~/x push'": "y=--x=; env A=\"$y\" bash -c 'git ~/x push'",
    "y='$(rm x)'; env BASH_ENV=\"$y\" bash -c :": "y='$(rm x)'; env A=\"$y\" bash -c :",
    "y='() { rm x; }'; env \"BASH_FUNC_ls%%=$y\" bash -c ls": "y='() { rm x; }'; env \"A=$y\" bash -c ls",
    # the grammar has no arithmetic here, or only a subshell
    "x='a[$(rm x)]'; cat <<E\n$((x))\nE": "x='a[$(rm x)]'; cat <<'E'\n$((x))\nE",
    "x='a[$(rm x)]'; cat <<E\nb $[x]\nE": "x='a[$(rm x)]'; cat <<'E'\nb $[x]\nE",
    "x='a[$(rm x)]'; echo ${y:-$((x))}": "x='a[$(rm x)]'; echo ${y:-$( (ls))}",
    "x='a[$(rm x)]'; echo ${y:-$[x]}": "x='a[$(rm x)]'; echo ${y:-[x]}",
    "x='a[$(rm x)]'; echo ${PATH%$[x]}": "x='a[$(rm x)]'; echo ${PATH%[x]}",
    "x='a[$(rm x)]'; [[ a =~ $[x] ]]": "x='a[$(rm x)]'; [[ a =~ [x] ]]",
    "x='a[$(rm x)]'; [[ a == b$((x)) ]]": "x='a[$(rm x)]'; [[ a == b$( (ls)) ]]",
    "x='a[$(rm x)]'; ! ((x))": "x='a[$(rm x)]'; ! ( (ls) )",
    "x='a[\\x24(rm x)]'; y=${x@E}; echo $((y))": "x='a[\\x24(rm x)]'; y=${x@Q}; echo $((y))",
}  # fmt: skip
"""Commands that run one of the programs by a variable or an option of bash, each with the nearest
command that does not. *Source*: each attack but those that need an option of a newer bash, or another
user, ran `rm` in bash 5.2.
"""

UNREAD = {
    "$((x))": "a[$(rm x)]",
    "${!x}": "a[`rm x`]",
    "${y:x}": "a[$(rm x)]",
}

HARMLESS = [
    "echo \"5$ rm\" $x", "cat <<EOF\nEnd (rm x)\n$ rm\nEOF", "x=$(cat <<EOF\nE(rm x)\nEOF\n)", "a[1]=x b=$x ls",
    "ls >&-", "(( 1 > (2) ))", "[[ a > b ]] && ls", "cat <<E 2>f\nx\nE",
    "fd rm", "fd -e py \"$X\"",
    "echo ${NAME:-not set}", 'echo "${NAME:-not set}"', "x=${A:+b c d}", "echo ${A:?is not set}",
    "ls a\u00a0b", "ls \u2003", "printf '%s\\n' a\u3000rm", "[ -f x ] && ls", "[ ! -d \"$X\" ] || ls",
    "export PATH=$HOME/bin:$PATH; ls", "npm --prefix \"$DIR\" install", "npm install $PACKAGE",
    "npx -y prettier . --check", "uv run -q pytest -k foo", "bash -euo pipefail -c 'echo $((1+1)) $(ls)'",
]  # fmt: skip


def shell_call(command: object, name: str = "command") -> CallFacts:
    return facts(SHELL, {name: command})


@pytest.mark.row("A1")
@pytest.mark.parametrize(("attack", "twin"), RUNNING.items())
def test_shell_syntax_does_not_hide_a_program_from_runs_rule(attack: str, twin: str) -> None:
    assert runs([pattern.split() for pattern in RUNS["runs"]], {"command": attack}, for_every=False)
    assert verdict(shell_call(attack), RUNS) is DENY
    assert verdict(shell_call(twin), RUNS) is ALLOW
    assert verdict(shell_call(attack)) is ALLOW  # control: without the rule


@pytest.mark.row("A1")
@pytest.mark.parametrize("command", UNREADABLE, ids=lambda command: ascii(command[:30]))
def test_unparsable_command_counts_as_running_the_denied_program(command: str) -> None:
    decision = decide(shell_call(command), RUNS)
    assert (decision.verdict, decision.reason and decision.reason[:9]) == (DENY, "In doubt:")


@pytest.mark.row("A1")
@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("ls\r\n", "its lines end in CR LF, as on Windows; send it with LF"),
        ("set -e\r\nls\n", "its lines end in CR LF, as on Windows; send it with LF"),
        ("bash -c 'ls\r\n'", "its lines end in CR LF, as on Windows; send it with LF"),
        ("ls\r", "it has control characters"), ("ls\r\n\x1b", "it has control characters"),
    ],
)  # fmt: skip
def test_command_with_lines_of_windows_is_told_to_end_them_in_lf(command: str, why: str) -> None:
    decision = decide(shell_call(command), RUNS)
    assert (decision.verdict, decision.reason) == (DENY, f"In doubt: {why}.")
    assert verdict(shell_call(command.replace("\r", "").replace("\x1b", "")), RUNS) is ALLOW


@pytest.mark.row("A1")
@pytest.mark.parametrize(("attack", "twin"), EVALUATED.items())
def test_variables_and_options_of_bash_do_not_hide_a_program(attack: str, twin: str) -> None:
    assert verdict(shell_call(attack), RUNS) is DENY
    assert verdict(shell_call(twin), RUNS) is ALLOW
    assert verdict(shell_call(attack)) is ALLOW  # control: without the rule


@pytest.mark.row("A1")
@pytest.mark.parametrize("as_list", [True, False])
def test_variables_of_the_call_do_not_hide_a_program(as_list: bool) -> None:
    def ruled(command: str, **env: str) -> Verdict:
        given = [{"name": name, "value": value} for name, value in env.items()]
        return verdict(facts(SHELL, {"command": command, "env": given if as_list else env}), RUNS)

    assert ruled("bash -c :", BASH_ENV="$(rm x)") is DENY
    assert ruled("ls", **{"BASH_FUNC_ls%%": "() { rm x; }"}) is DENY
    assert ruled("ls", ENV="$(rm x)") is DENY
    assert ruled("git ~/x push", HOME="--git-dir=") is DENY
    assert ruled("git ~/x push", HOME="/home/me") is ALLOW
    assert ruled("ls", ENV="production", PS4="+ ", NODE_ENV="$(rm x)") is ALLOW
    for command, value in UNREAD.items():
        assert ruled(f"echo {command}", x=value) is DENY
        assert ruled("echo $x", x=value) is ALLOW
        assert ruled(f"echo {command}", x="a[1]") is ALLOW


@pytest.mark.row("A1")
@pytest.mark.parametrize("command", HARMLESS)
def test_harmless_command_is_not_in_doubt(command: str) -> None:
    assert runs([["rm"], ["git", "push"]], {"command": command}, for_every=False) is False


def _prefix(wrapper: str) -> str:
    """A command up to the program that the wrapper runs."""
    return " ".join([wrapper, *["0"] * WRAPPERS[wrapper].operands])


@pytest.mark.row("A1")
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_program_behind_a_wrapper_is_found(wrapper: str) -> None:
    prefix = _prefix(wrapper)
    for attack in ("rm x", "-- rm x", "--long rm x", "--long v rm x", "nice -n 1 sh -c 'rm x'"):
        assert verdict(shell_call(f"{prefix} {attack}"), RUNS) is DENY
    operands = "0 " * WRAPPERS[wrapper].may_have
    assert verdict(shell_call(f"{prefix} {operands}ls rm"), RUNS) is ALLOW
    assert verdict(shell_call(f"echo {prefix} rm"), RUNS) is ALLOW
    assert verdict(shell_call(f"{prefix} rm x"), rule("deny", runs=["mv"])) is ALLOW  # control


@pytest.mark.row("A1")
@pytest.mark.parametrize("program", sorted(OPAQUE))
def test_program_whose_arguments_are_not_read_is_in_doubt(program: str) -> None:
    assert runs([["rm"]], {"command": f"{program} x"}, for_every=False) is None
    assert runs([["rm"]], {"command": f"echo {program} rm"}, for_every=False) is False


@pytest.mark.row("A1")
@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("unshare -r", DENY), ("unshare -w rm ls", ALLOW), ("nsenter -t 1 <<< 'rm x'", DENY),
        ("setarch x86_64", DENY), ("setarch -R rm x", DENY), ("setarch x86_64 -R ls", ALLOW),
        ("fakeroot", DENY), ("npx", DENY), ("npx -c 'rm x'", DENY), ("npx -p pkg cowsay", ALLOW),
        ("systemd-run -S", DENY), ("systemd-run --user ls", ALLOW), ("uv pip install rm", ALLOW),
        ("uv -q --directory run run rm", DENY), ("uv $X rm", DENY), ("ip n e blue rm", DENY),
        ("ip addr show rm", ALLOW), ("poetry add rm", ALLOW), ("npm rm", ALLOW), ("npm x rm", DENY),
        ("setpriv --reuid 0 --no-new-privs rm x", DENY), ("prlimit --nofile=9 -- rm x", DENY),
    ],
)  # fmt: skip
def test_operands_and_options_of_wrappers_are_read(command: str, expected: Verdict) -> None:
    assert verdict(shell_call(command), RUNS) is expected


COMMANDS = st.sampled_from(
    [*RUNNING, *RUNNING.values(), *EVALUATED, *EVALUATED.values(), *UNREADABLE[:70]]
)
OPTIONS = st.sampled_from(["", " -x", " --x", " --x=y", " --x y", " --"])


@pytest.mark.row("A1")
@given(
    st.sampled_from(sorted(WRAPPERS)).filter(lambda name: name != "command"),
    OPTIONS,
    st.sampled_from(
        ["rm x", "ls rm", "git push", "$X y", "sh -c 'rm x'", "sh x", "eval x", "set -k", "env rm"]
    ),
    st.sampled_from([[["rm"]], [["ls"]], [["git", "push"]], [["env"], ["sh"]]]),
)
def test_wrapper_around_a_program_can_only_make_the_verdict_stricter(
    wrapper: str, option: str, command: str, programs: list[list[str]]
) -> None:
    prefix = _prefix(wrapper) + (" A=b" if WRAPPERS[wrapper].takes_variables else "")
    bare, wrapped = {"command": command}, {"command": f"{prefix}{option} {command}"}
    if runs(programs, bare, for_every=False) is not False:
        assert runs(programs, wrapped, for_every=False) is not False
    if runs(programs, bare, for_every=True) is not True:
        assert runs(programs, wrapped, for_every=True) is not True


@pytest.mark.row("A1")
@given(COMMANDS, st.sampled_from(["bash -c ", "sh -c ", "env bash -euc ", "nice -n 1 bash -c "]))
def test_shell_around_a_command_can_only_make_the_verdict_stricter(
    command: str, shell: str
) -> None:
    quoted = shell + "'" + command.replace("'", "'\\''") + "'"
    if verdict(shell_call(command), RUNS) is DENY:
        assert verdict(shell_call(quoted), RUNS) is DENY


@pytest.mark.row("A1")
@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["rm", "x"], DENY),
        (["/bin/rm"], DENY),
        (["sudo", "git", "-C", "x", "push"], DENY),
        (["bash", "-lc", "ls; rm x"], DENY),
        (["find", ".", "-delete"], DENY),
        (["$X", "rm"], ALLOW),  # no shell reads it
        (["echo", "$(rm)"], ALLOW),
        (["git", "log", "push"], ALLOW),
        ([], DENY),
        (["rm", 1], DENY),
        (["echo", "x" * 20_000], DENY),
        (["find", ".", *(["-exec", "sh", "-c", "ls", ";"] * 30)], DENY),
        (None, DENY),
        ({"0": "rm"}, DENY),
    ],
)
def test_argv_without_shell_is_matched_by_its_words(argv: object, expected: Verdict) -> None:
    assert verdict(shell_call(argv, "argv"), RUNS) is expected
    assert verdict(shell_call(argv), RUNS) is expected  # some agents' `command` is a list


@pytest.mark.row("A1")
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"command": "ls -la"}, ALLOW),
        ({"command": "git status --short | grep x"}, ALLOW),
        ({"argv": ["git", "status"]}, ALLOW),
        ({"command": "ls 2>&1 >/dev/null"}, ALLOW),
        ({"command": "git -C x status"}, ASK),
        ({"command": "git -c core.pager=x status"}, ASK),
        ({"command": "ls; rm x"}, ASK),
        ({"command": "ls $(rm x)"}, ASK),
        ({"command": "/tmp/ls"}, ASK),
        ({"command": "ls >/dev/null 2>&1 </dev/null 3>&-"}, ALLOW),
        ({"command": 'while ls "$x" | grep x; do ls; done'}, ALLOW),
        ({"command": "ls > ~/.bashrc"}, ASK),
        ({"command": "ls >& ~/.bashrc"}, ASK),
        ({"command": "ls >&f"}, ASK),
        ({"command": "ls <>f"}, ASK),
        ({"command": "ls {PATH}>/dev/null"}, ASK),
        ({"command": "for PATH in /tmp; do ls; done"}, ASK),
        ({"command": "select PATH in /tmp; do ls; done"}, ASK),
        ({"command": "((PATH=0)); ls"}, ASK),
        ({"command": "ls $((PATH=0))"}, ASK),
        ({"command": "ls $[PATH=0]"}, ASK),
        ({"command": "grep x <<E\na $[PATH=0]\nE\nls"}, ASK),
        ({"command": "grep x <<E\na $((ls -PATH--))\nE\nls"}, ASK),
        ({"command": "! ((ls -PATH--)); ls"}, ASK),
        ({"command": "git status <<E -c core.fsmonitor=x\nE"}, ASK),
        ({"command": "grep x <<E\na $(ls -l)\nE\nls"}, ALLOW),
        ({"command": "ls ${BASH_ENV:=x}"}, ASK),
        ({"command": "[[ PATH=0 -eq 0 ]]; ls"}, ASK),
        ({"command": "PATH=/tmp ls"}, ASK),
        ({"command": "ls() { rm x; }; ls"}, ASK),
        ({"command": "ls", "env": [{"name": "PATH", "value": "/tmp"}]}, ASK),
        ({"command": "ls", "argv": ["rm"]}, ASK),
        ({"command": "nice ls"}, ASK),
        ({"command": "[ -f x ] && ls"}, ASK),
        ({"command": "test -d x && ls"}, ALLOW),
        ({"command": '[ -d "$X" ] && ls'}, ASK),
        ({"command": "[ -d x ] && ls"}, ALLOW),
        ({"argv": ["[", "-d", "x", "]"]}, ALLOW),
        ({"command": "[ -d $((PATH=0)) ] && ls"}, ASK),
        ({"command": "[ -d x ] > f && ls"}, ASK),
        ({"command": "ls >\u00a0/dev/null"}, ASK),
        ({"command": "ls >&\u0663"}, ASK),
        ({"command": "uv run ls"}, ASK),
        ({"command": "$X"}, ASK),
        ({"command": "# ls"}, ASK),
        ({"command": ""}, ASK),
        ({}, ASK),
    ],
)
def test_allow_rule_for_programs_does_not_open_anything_else(
    arguments: dict[str, Any], expected: Verdict
) -> None:
    dangerous = tool("sh", dangerous=True)
    opens = rule("allow", tools=["sh"], runs=["ls", "git status", "grep", "test -d x"])
    assert verdict(facts(dangerous, arguments), opens) is expected


LONG = {
    "options": "env " + "--a " * 3_000,
    "values": "env " + "--a x " * 2_600,
    "replacements": "xargs " + "--replace=a " * 1_300,
    "-ok": ["find", *["-ok"] * 5_000],
    "-ok x": ["find", *["-ok", ""] * 4_000],
    "empty": ["find", *["-ok"] * 1_000, *[""] * 1_000_000],
    "comments": "#\n" * 8_000,
    "quotes": "a" + " ''" * 5_000,
}


@pytest.mark.row("A1")
@pytest.mark.parametrize("command", LONG.values(), ids=LONG)
def test_worst_case_command_is_analysed_in_bounded_time(command: object) -> None:
    begun = time.thread_time()
    assert verdict(shell_call(command), RUNS) in (ALLOW, DENY)
    assert time.thread_time() - begun < 1


PIECES = st.sampled_from([
    "rm", "git", "push", " ", " ", "\n", ";", "&&", "|", "(", ")", "$(", "{", "}", "`", "'", '"', "\\", "#",
    "<<E", "\nE\n", "<", ">", "&", "$x", "${", "[[", "]]", "[", "]", "if", "then", "fi", "for", "in", "do",
    "done", "case", "esac", "((", "))", "=", "x=", "bash -c", "xargs", "env", "-x", "--", "é", "\0", "\x7f", "😀",
])  # fmt: skip


@pytest.mark.row("A1")
@given(st.lists(PIECES, max_size=30).map("".join) | st.text(max_size=200))
def test_any_text_is_analysed_without_a_failure(text: str) -> None:
    assert verdict(shell_call(text), RUNS) in (ALLOW, DENY)
    assert verdict(shell_call([text], "argv"), RUNS) in (ALLOW, DENY)


READ = """
import json, resource, sys
from pathlib import Path
resource.setrlimit(resource.RLIMIT_CPU, (20, 20))
resource.setrlimit(resource.RLIMIT_AS, (600 << 20, 600 << 20))
from fumehood.policy.loader import parse_policy
from fumehood.policy.model import PolicyError
told = {}
for path in sorted(Path(sys.argv[1]).iterdir()):
    try:
        told[path.name] = len(parse_policy(path.name, path.read_bytes(), [("a", "1.0.0")]).rules)
    except PolicyError as refused:
        told[path.name] = str(refused)[:300]
print(json.dumps(told))
"""

HEAD = '[[rules]]\nid = "r"\ndecision = "deny"\n'
MB = 1 << 20
BOMBS = {
    # name of the file: its text, and what is told
    "deep.toml": (HEAD + "x = " + "[" * 20_000 + "]" * 20_000, "nested deeper than 64 levels"),
    "dotted.toml": ("a." * (MB // 2 - 10) + "b = 1", "a dotted key has more than 64 parts"),
    "alias.yaml": ("a: &a [x, x]\nrules: [*a, *a]\n", "anchors and aliases are not accepted"),
    "tag.yaml": ("rules: !!python/object/apply:os.system [id]\n", "tags are not accepted"),
    "digits.toml": (HEAD + "quorum = " + "9" * 100_000, "a number has too many digits"),
    "brackets.toml": (HEAD + "reason = '" + "[" * 900_000 + "'", "reason: has more than 1000 characters"),
    "quotes.toml": (HEAD + 'reason = """' + '\\"""' * 200_000 + '"""', "reason: has more than 1000 characters"),
    "conditions.toml": (
        HEAD + '[[rules.when]]\nargument = "/a"\nprefix = "x"\n' * 20_000,
        "has more than 50 entries",
    ),
    "names.toml": (HEAD + f"tools = {json.dumps(['a'] * 100_000)}", "tools: has more than 1000 entries"),
    "pointer.toml": (
        HEAD + '[[rules.when]]\nargument = "' + "/*" * 300_000 + '"\nprefix = "x"\n',
        "has more than 4096 characters",
    ),
    "equals.toml": (
        HEAD + '[[rules.when]]\nargument = "/a"\nequals = ' + "[" * 70 + "]" * 70,
        "nested deeper than 64 levels",
    ),
    "surrogate.yaml": ('rules: [{id: "\\ud800", decision: deny}]\n', "surrogate"),
    "escape.toml": (HEAD.replace('"r"', '"\\u001b[2J"'), r"rule '\\x1b[2J'"),
}  # fmt: skip
TWIN = HEAD + '[[rules.when]]\nargument = "/*/*"\nequals = [[[["x"]]]]\n'


@pytest.mark.row("A1")
def test_policy_file_bomb_is_refused_for_its_reason_within_limits(tmp_path: Path) -> None:
    for name, (text, _) in BOMBS.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "twin.toml").write_text(TWIN, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", READ, str(tmp_path)], capture_output=True, timeout=600
    )
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    told = json.loads(done.stdout)
    assert told.pop("twin.toml") == 1
    assert told.keys() == BOMBS.keys()
    for name, (_, reason) in BOMBS.items():
        assert reason in told[name], (name, told[name])
        assert "\x1b" not in told[name]
