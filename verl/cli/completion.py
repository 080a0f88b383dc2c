"""``verl completion SHELL``: a script that completes commands, their options and configuration keys.

The words are in the script, so completing starts no process. Print it again after an update.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import re

from verl.cli.arguments import Arguments
from verl.errors import ConfigError

SHELLS = ("bash", "zsh", "fish")
TAKE_KEYS = ("train", "plan", "quickstart")
"""Commands that take configuration overrides."""


def main(argv: list[str]) -> int:
    """Print the script."""
    parser = Arguments(
        prog="verl completion",
        description='Print a completion script. bash: eval "$(verl completion bash)" in ~/.bashrc. zsh: the same with '
        "zsh in ~/.zshrc, after compinit. fish: verl completion fish > ~/.config/fish/completions/verl.fish",
    )
    parser.add_argument("shell", metavar="|".join(SHELLS))
    shell = parser.parse_args(argv).shell
    if shell not in SHELLS:
        raise ConfigError(f"there is no completion for '{shell}'; there is for {', '.join(SHELLS)}")
    print(script(shell))
    return 0


def script(shell: str) -> str:
    """The completion script of a shell."""
    from verl.cli.main import COMMANDS

    options = {name: command_options(command.target) for name, command in COMMANDS.items()}
    summaries = {name: command.summary for name, command in COMMANDS.items()}
    keys = config_keys()
    return {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell](summaries, options, keys)


def command_options(target: str) -> list[str]:
    """The long options of a command, out of its own help."""
    module, _, function = target.partition(":")
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        getattr(importlib.import_module(module), function)(["--help"])
    return sorted(set(re.findall(r"(?<![\w-])--[a-z][a-z_-]*", out.getvalue())))


def config_keys() -> list[str]:
    """Every configuration key that ends in a value."""
    from verl.config import Config, to_dict
    from verl.tracking.plain import flatten

    return sorted(flatten(to_dict(Config())))


def _cases(options: dict[str, list[str]]) -> str:
    return "\n".join(f"    {name}) options='{' '.join(words)}';;" for name, words in options.items())


def _bash(summaries: dict[str, str], options: dict[str, list[str]], keys: list[str]) -> str:
    return f"""# completion of verl for bash
_verl_keys='{" ".join(f"{key}=" for key in keys)}'
_verl() {{
  local line="${{COMP_LINE:0:$COMP_POINT}}" word="" command="${{COMP_WORDS[1]}}" options=""
  [[ "$line" == *" " ]] || word="${{line##* }}"
  COMPREPLY=()
  if [[ $COMP_CWORD -le 1 ]]; then
    COMPREPLY=($(compgen -W '{" ".join(summaries)}' -- "$word"))
    return
  fi
  case "$command" in
    completion) COMPREPLY=($(compgen -W '{" ".join(SHELLS)}' -- "$word")); return;;
{_cases(options)}
  esac
  if [[ "$word" == -* ]]; then
    COMPREPLY=($(compgen -W "$options" -- "$word"))
  elif [[ "$word" == *=* ]]; then
    compopt -o default; COMPREPLY=($(compgen -f -- "${{word#*=}}"))
  elif [[ " {" ".join(TAKE_KEYS)} " == *" $command "* ]]; then
    compopt -o nospace; COMPREPLY=($(compgen -W "$_verl_keys" -- "$word"))
  else
    compopt -o default
  fi
}}
complete -F _verl verl"""


def _zsh(summaries: dict[str, str], options: dict[str, list[str]], keys: list[str]) -> str:
    commands = "\n".join(f"    '{name}:{_quoted(text)}'" for name, text in summaries.items())
    return f"""#compdef verl
# completion of verl for zsh
_verl() {{
  local -a commands keys words_of
  local options=""
  commands=(
{commands}
  )
  if (( CURRENT == 2 )); then _describe command commands; return; fi
  case "${{words[2]}}" in
    completion) compadd {" ".join(SHELLS)}; return;;
{_cases(options)}
  esac
  if [[ "${{words[CURRENT]}}" == -* ]]; then
    words_of=(${{=options}}); compadd -a words_of
  elif [[ "${{words[CURRENT]}}" == *=* ]]; then
    compset -P '*='; _files
  elif [[ " {" ".join(TAKE_KEYS)} " == *" ${{words[2]}} "* ]]; then
    keys=({" ".join(keys)}); compadd -S = -a keys
  else
    _files
  fi
}}
if [[ "$funcstack[1]" == _verl ]]; then _verl "$@"; else compdef _verl verl; fi"""


def _fish(summaries: dict[str, str], options: dict[str, list[str]], keys: list[str]) -> str:
    lines = ["# completion of verl for fish", "complete -c verl -f -n __fish_use_subcommand"]
    lines += [
        f"complete -c verl -f -n __fish_use_subcommand -a {name} -d '{_quoted(text)}'"
        for name, text in summaries.items()
    ]
    for name, words in options.items():
        seen = f"-n '__fish_seen_subcommand_from {name}'"
        lines += [f"complete -c verl {seen} -l {word[2:]}" for word in words]
    seen = f"-n '__fish_seen_subcommand_from {' '.join(TAKE_KEYS)}'"
    lines.append(f"complete -c verl {seen} -f -a '{' '.join(f'{key}=' for key in keys)}'")
    lines.append(f"complete -c verl -n '__fish_seen_subcommand_from completion' -f -a '{' '.join(SHELLS)}'")
    return "\n".join(lines)


def _quoted(text: str) -> str:
    """For single quotes of a shell; zsh takes a colon as the end of a description."""
    return text.replace("'", "").replace(":", "\\:")
