"""Rust sources as tokens, for the checks of this directory."""

import functools
import re

TOKEN = re.compile(
    r"""(?P<skip>\s+|//[^\n]*)
      | (?P<block>/\*)
      | (?P<text>[bc]?r(?P<hashes>\#*)".*?"(?P=hashes) | [bc]?"(?:\\.|[^"\\])*"
                | b?'(?:\\u\{[^}]*\}|\\x..|\\.|[^'\\])')
      | (?P<lifetime>'\w+)
      | (?P<name>(?:r\#)?[A-Za-z_]\w*)
      | (?P<other>::|\.\.[.=]?|\d\w*|.)""",
    re.VERBOSE | re.DOTALL,
)
ITEMS = {"const", "enum", "fn", "mod", "static", "struct", "trait", "type", "union", "use"}


class Token(str):
    """A token's text, with its `line` and the last line that it covers."""

    def __new__(cls, text, line, kind):
        token = super().__new__(cls, text)
        token.line, token.end, token.is_name = line, line + text.count("\n"), kind == "name"
        return token


@functools.cache
def tokens_of(text):
    """The tokens of a Rust source without comments. A string or character is one token."""
    tokens, at, line = [], 0, 1
    while at < len(text):
        match = TOKEN.match(text, at)
        end, kind = match.end(), match.lastgroup
        if kind == "block":
            depth = 1
            for edge in re.compile(r"/\*|\*/").finditer(text, end):
                depth += 1 if edge[0] == "/*" else -1
                end = edge.end()
                if depth == 0:
                    break
        elif kind != "skip":
            tokens.append(Token(match[0].removeprefix("r#") if kind == "name" else match[0], line, kind))
        line += text.count("\n", at, end)
        at = end
    return tokens


def closing(tokens, at):
    """The index after the bracket that closes the one at `at`."""
    depth = 0
    for index in range(at, len(tokens)):
        depth += (tokens[index] in ("(", "[", "{")) - (tokens[index] in (")", "]", "}"))
        if depth == 0:
            return index + 1
    return len(tokens)


def without_tests(tokens):
    """Leaves out each item that `#[cfg(test)]` or `#[cfg(all(test, ...))]` marks."""
    return without(tokens, "test")


def without(tokens, option):
    """Leaves out each item that is there only with this option of `cfg`."""
    kept, at = [], 0
    while at < len(tokens):
        if tokens[at] == "#" and tokens[at + 1] == "[" and tokens[at + 2] == "cfg":
            end = closing(tokens, at + 1)
            condition = tokens[at:end]
            if option in condition and "not" not in condition and "any" not in condition:
                at = item_end(tokens, end)
                continue
        kept.append(tokens[at])
        at += 1
    return kept


def item_end(tokens, at):
    """The index after the item (or the field, or the statement) at `at`, attributes included."""
    while tokens[at] == "#":
        at = closing(tokens, at + 1)
    first, is_item = at, False
    while at < len(tokens):
        token = tokens[at]
        is_item = is_item or token in ITEMS or token in ("impl", "macro_rules", "extern")
        if token in (")", "]", "}"):
            return at
        if token == ";" or token == "," and not is_item:
            return at + 1
        if token == "{" and not {"use", "const", "static", "let"} & set(tokens[first : first + 3]):
            return closing(tokens, at)
        at = closing(tokens, at) if token in ("(", "[", "{") else at + 1
    return at
