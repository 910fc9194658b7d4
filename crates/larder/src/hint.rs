//! The next step after an error, as data: the program that shows a hint formats its commands and settings.

use std::borrow::Cow;
use std::fmt;

/// The next step after an error: text, larder commands and settings, in reading order.
///
/// It prints as it reads on a command line on which nothing else is given.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Hint(Vec<HintPart>);

/// One part of a [`Hint`].
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum HintPart {
    /// Words, with the spaces between them and the next part.
    Text(Cow<'static, str>),
    /// A command of larder, such as `["fsck", "--repair"]`.
    Command(Vec<Cow<'static, str>>),
    /// A setting, or an option of the command before it, with an example of a value.
    Setting {
        /// Its name, such as `backend`.
        name: Cow<'static, str>,
        /// Example of a value, such as `unix: path/to.sock`; may be empty.
        value: Cow<'static, str>,
    },
}

impl Hint {
    /// A hint without any parts, to begin with.
    pub fn new() -> Self {
        Hint::default()
    }

    /// The hint, followed by words.
    #[must_use]
    pub fn text(self, text: impl Into<Cow<'static, str>>) -> Self {
        self.with(HintPart::Text(text.into()))
    }

    /// The hint, followed by a command of larder: its arguments after the program and the options of every command.
    #[must_use]
    pub fn command<A: Into<Cow<'static, str>>>(self, args: impl IntoIterator<Item = A>) -> Self {
        self.with(HintPart::Command(args.into_iter().map(Into::into).collect()))
    }

    /// The hint, followed by a setting with an example of a value.
    #[must_use]
    pub fn setting(self, name: impl Into<Cow<'static, str>>, value: impl Into<Cow<'static, str>>) -> Self {
        self.with(HintPart::Setting { name: name.into(), value: value.into() })
    }

    /// The parts in their order.
    pub fn parts(&self) -> &[HintPart] {
        &self.0
    }

    /// The hint, followed by a part.
    #[must_use]
    pub fn with(mut self, part: HintPart) -> Self {
        self.0.push(part);
        self
    }
}

impl fmt::Display for Hint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|part| write!(f, "{part}"))
    }
}

impl fmt::Display for HintPart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            HintPart::Text(text) => f.write_str(text),
            HintPart::Command(args) => write!(f, "larder {}", args.join(" ")),
            HintPart::Setting { name, value } if value.is_empty() => write!(f, "--{name}"),
            HintPart::Setting { name, value } => write!(f, "--{name} {value}"),
        }
    }
}

impl<T: Into<Cow<'static, str>>> From<T> for Hint {
    fn from(text: T) -> Self {
        Hint::new().text(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hint_prints_as_it_reads_on_the_command_line() {
        for (hint, text) in [
            (Hint::from("see the log"), "see the log"),
            (
                Hint::new().command(["fsck", "--repair"]).text(" repairs it"),
                "larder fsck --repair repairs it",
            ),
            (
                Hint::from("name its socket with ").setting("backend", "unix:///path/to.sock"),
                "name its socket with --backend unix:///path/to.sock",
            ),
            (
                Hint::from("wait longer with ").setting("timeout", "").text(", or see the log"),
                "wait longer with --timeout, or see the log",
            ),
        ] {
            assert_eq!(hint.to_string(), text);
        }
    }
}
