"""A table of files in a project that common tools execute merely because the files exist.

Host side. The diff of such a file looks like any other diff, so approvers get a warning about it.
Such files are not refused, because most projects contain some. The table lists files that common
tools execute when they start in a directory, or even when they only read it. It cannot be complete.
"""

from __future__ import annotations

import re

from fumehood.projects.rules import plain

# A name that ends in a slash is a directory. It stands for everything below that directory too.
_TABLE = {
    "direnv": ".envrc",
    "mise": "mise.toml .mise.toml mise.*.toml .mise/",
    "make": "makefile gnumakefile *.mk",
    "just": "justfile .justfile",
    "task": "taskfile.yml taskfile.yaml taskfile.dist.*",
    "rake": "rakefile",
    "Bundler": "gemfile *.gemspec .bundle/",
    "Ruby": ".rspec .irbrc .pryrc guardfile",
    "npm": "package.json .npmrc .npm/",
    "Yarn": ".yarnrc .yarnrc.yml .yarn/",
    "pnpm": ".pnpmfile.cjs pnpm-workspace.yaml",
    "Node": "*.config.js *.config.cjs *.config.mjs *.config.ts *.config.mts *.config.cts "
    ".*rc.js .*rc.cjs .*rc.mjs .babelrc gulpfile.* gruntfile.* node_modules/",
    "Deno": "deno.json deno.jsonc",
    "pytest": "conftest.py pytest.ini .pytest.ini",
    "Python": "sitecustomize.py usercustomize.py *.pth setup.py .venv/ venv/",
    "Python's build tools": "pyproject.toml setup.cfg tox.ini noxfile.py dodo.py tasks.py "
    "fabfile.py",
    "Jupyter": ".ipython/ .jupyter/",
    "Composer": "composer.json",
    "Cargo": "build.rs .cargo/ rust-toolchain rust-toolchain.toml",
    "CMake": "cmakelists.txt *.cmake cmakepresets.json cmakeuserpresets.json",
    "Meson": "meson.build",
    "autotools": "configure configure.ac makefile.am makefile.in autogen.sh",
    "SCons": "sconstruct sconscript",
    "Gradle": "build.gradle build.gradle.kts settings.gradle settings.gradle.kts init.gradle "
    "gradle.properties gradlew gradlew.bat gradle/ buildsrc/",
    "Maven": "pom.xml mvnw mvnw.cmd .mvn/",
    "sbt": "build.sbt *.sbt",
    "Bazel": "build build.bazel workspace workspace.bazel module.bazel .bazelrc *.bzl",
    ".NET": "*.csproj *.fsproj *.vbproj *.props *.targets nuget.config global.json",
    "Mix": "mix.exs",
    "Nix": "flake.nix shell.nix default.nix",
    "Docker": "dockerfile dockerfile.* *.dockerfile containerfile docker-compose*.yml "
    "docker-compose*.yaml compose*.yml compose*.yaml docker-bake.hcl",
    "Terraform": "*.tf *.tf.json .terraform/ .terraformrc",
    "Tilt": "tiltfile",
    "Vagrant": "vagrantfile",
    "foreman": "procfile procfile.*",
    "git": ".gitattributes .gitmodules .gitconfig .lfsconfig",
    "git hooks": ".husky/ .githooks/ git-hooks/ .lefthook/ lefthook.yml lefthook.yaml "
    ".lefthook.yml .lefthook.yaml .pre-commit-config.yaml .pre-commit-hooks.yaml .overcommit.yml "
    ".lintstagedrc*",
    # Agents follow these files rather than execute them. The first match counts, so this entry
    # comes before the entries for whole directories, such as `.github/`.
    "coding agents, as instructions": "claude.md claude.local.md agents.md agents.override.md "
    "agent.md gemini.md qwen.md .cursorrules .cursor/rules/ .windsurfrules .windsurf/rules/ "
    ".clinerules/ .roorules* .goosehints .junie/ .kiro/ .augment/ .augment-guidelines "
    ".github/copilot-instructions.md .github/instructions/ .github/prompts/ .github/agents/",
    "CI": ".github/ .gitlab-ci.yml .gitlab/ .circleci/ .travis.yml .drone.yml .woodpecker/ "
    ".woodpecker.yml .buildkite/ jenkinsfile azure-pipelines.yml bitbucket-pipelines.yml "
    "appveyor.yml .forgejo/ .gitea/",
    "editors": ".vscode/ *.code-workspace .idea/ .fleet/ .zed/ .nvim.lua .nvimrc .exrc .vimrc "
    ".lvimrc .vim/ .dir-locals.el .dir-locals-2.el .emacs.d/ .devcontainer/ "
    ".devcontainer.json *.sublime-project .theia/",
    "coding agents": ".claude/ .cursor/ .codex/ .gemini/ .continue/ .aider.conf.yml .mcp.json "
    ".windsurf/ .roo/ .opencode/ opencode.json",
    "debuggers": ".gdbinit .lldbinit",
    "shells": ".bashrc .bash_profile .bash_login .bash_logout .profile .zshrc .zshenv .zprofile "
    ".zlogin .kshrc .cshrc .tcshrc .inputrc .screenrc .tmux.conf .autoenv .env.zsh",
    "the desktop": "*.desktop autostart/ systemd/",
    "SSH": ".ssh/",
}
"""Tool → the names of files and directories that it executes, in the form that `plain` returns. `*`
matches any characters except a slash.
"""


def _pattern(names: str) -> str:
    ways = []
    for name in names.split():
        glob = "[^/]*".join(map(re.escape, name.rstrip("/").split("*")))
        ways.append(glob + ("(?:/|$)" if name.endswith("/") else "$"))
    return f"/(?:{'|'.join(ways)})"


_PATTERNS = {tool: re.compile(_pattern(names)) for tool, names in _TABLE.items()}


def executed_by(path: str) -> str | None:
    """Return the name of a common tool that executes a file or link at `path` in a project merely
    because the file exists. Return None if the module's table contains no such tool.
    """
    # Some file systems treat a backslash as a slash.
    looked_at = "/" + "/".join(plain(part) for part in path.replace("\\", "/").split("/"))
    return next((tool for tool, one in _PATTERNS.items() if one.search(looked_at)), None)
