"""Shell completion: a static script generated from the argument parser, so that Tab starts no Python."""

from __future__ import annotations

import argparse
from collections.abc import Iterator


def words_of(parser: argparse.ArgumentParser, path: str = "") -> Iterator[tuple[str, list[str]]]:
    """Every command (" train subsets") with its subcommands, options and choices."""
    words: list[str] = []
    for action in parser._actions:
        words += [option for option in action.option_strings if option.startswith("--")]
        if not action.option_strings and action.choices:
            words += map(str, action.choices)
        if isinstance(action, argparse._SubParsersAction):
            for name, sub in action.choices.items():
                yield from words_of(sub, f"{path} {name}")
    yield path, words


def script(parser: argparse.ArgumentParser) -> str:
    """For bash, and for zsh after ``bashcompinit``."""
    commands = dict(words_of(parser))
    known = "|".join(f'"{path}"' for path in sorted(commands) if path)
    cases = "\n".join(f'    "{path}") words="{" ".join(words)}" ;;' for path, words in sorted(commands.items()))
    return f"""# torchcpl: eval "$(torchcpl completion)", in zsh after: autoload -U bashcompinit && bashcompinit
_torchcpl() {{
  local at="" word words=""
  for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
    case "$at $word" in {known}) at="$at $word" ;; esac
  done
  case "$at" in
{cases}
  esac
  COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _torchcpl torchcpl"""
