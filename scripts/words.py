"""The list of words to avoid, in words.txt, and how they are found."""

import re
from pathlib import Path

FILE = Path(__file__).with_name("words.txt")


class Word:
    """A word: its forms, and how often sources and messages may contain it."""

    def __init__(self, line):
        sources, messages, *self.forms = line.split()
        self.budget = {"sources": int(sources), "messages": int(messages)}
        # A part of an identifier counts: `told_by`, `LayerFolder`, `TOLD`; a part of a word does not: `recommend`.
        patterns = (
            rf"(?<![A-Za-z]){form}(?![a-z])|{form.capitalize()}(?![a-z])|(?<![A-Za-z]){form.upper()}(?![A-Za-z])"
            for form in self.forms
        )
        self.pattern = re.compile("|".join(patterns))

    def count(self, text):
        return len(self.pattern.findall(text))


def listed(text=None):
    """The words in their order."""
    lines = (text or FILE.read_text(encoding="utf-8")).splitlines()
    return [Word(line) for line in lines if line.strip() and not line.startswith("#")]


def in_text(words):
    """Matches each form as a word of its own, in any case."""
    return re.compile(rf"\b({'|'.join(form for word in words for form in word.forms)})\b", re.IGNORECASE)


def record(counts):
    """Writes the counts, a pair (sources, messages) for each word in order, as the new budget."""
    comments = [line for line in FILE.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
    lines = [f"{sources} {messages} {' '.join(word.forms)}" for word, (sources, messages) in zip(listed(), counts)]
    FILE.write_text("\n".join([*comments, *lines, ""]), encoding="utf-8")
