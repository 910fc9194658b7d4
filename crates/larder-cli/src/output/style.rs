//! Colors, where a terminal is or where they are requested.

#![allow(clippy::doc_markdown, reason = "these comments are the text of --help")]

use std::io::IsTerminal;

use clap::ValueEnum;

/// When to use colors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub(crate) enum ColorChoice {
    /// On a terminal, unless NO_COLOR is set or TERM is dumb; CLICOLOR_FORCE uses them everywhere.
    #[default]
    Auto,
    /// Always.
    Always,
    /// Never.
    Never,
}

/// Role of a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TextStyle {
    Plain,
    Head,
    Good,
    Bad,
    Warning,
    Hint,
    Faint,
}

/// Whether texts of one output have colors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Style {
    pub(crate) colors: bool,
}

impl ColorChoice {
    /// The style of an output.
    pub(crate) fn style(self, output: &impl IsTerminal) -> Style {
        Style { colors: self.colors(output.is_terminal(), |name| std::env::var(name).ok()) }
    }

    fn colors(self, is_terminal: bool, variable: impl Fn(&str) -> Option<String>) -> bool {
        let is_set = |name: &str| variable(name).is_some_and(|value| !value.is_empty());
        match self {
            ColorChoice::Always => true,
            ColorChoice::Never => false,
            ColorChoice::Auto if is_set("NO_COLOR") => false,
            ColorChoice::Auto
                if variable("CLICOLOR_FORCE").is_some_and(|value| !value.is_empty() && value != "0") =>
            {
                true
            }
            ColorChoice::Auto => {
                let is_off = variable("CLICOLOR").is_some_and(|value| value == "0");
                is_terminal && !is_off && variable("TERM").is_none_or(|term| term != "dumb")
            }
        }
    }
}

impl Style {
    /// The text in the color of its style.
    pub(crate) fn paint(self, style: TextStyle, text: &str) -> String {
        let code = match style {
            _ if !self.colors => return text.to_owned(),
            TextStyle::Plain => return text.to_owned(),
            TextStyle::Head => "1",
            TextStyle::Good => "32",
            TextStyle::Bad => "1;31",
            TextStyle::Warning => "33",
            TextStyle::Hint => "36",
            TextStyle::Faint => "2",
        };
        format!("\u{1b}[{code}m{text}\u{1b}[0m")
    }
}

impl TextStyle {
    /// The style of a cell in the column with this head.
    pub(super) fn of_cell(head: &str, cell: &str) -> TextStyle {
        match (head, cell) {
            (_, "-" | "<none>") => TextStyle::Faint,
            ("RESULT", "Present" | "Pulled") | ("LAST USED", "in use") => TextStyle::Good,
            ("RESULT", "Unfinished") => TextStyle::Warning,
            ("RESULT", _) => TextStyle::Bad,
            _ => TextStyle::Plain,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn colors_are_used_on_terminals_unless_a_variable_or_a_flag_decides() {
        let colors = |choice: ColorChoice, is_terminal, variables: &[(&str, &str)]| {
            choice.colors(is_terminal, |name| {
                variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
            })
        };
        for (is_terminal, variables, expected) in [
            (true, &[][..], true),
            (false, &[], false),
            (true, &[("NO_COLOR", "1")], false),
            (true, &[("NO_COLOR", "")], true),
            (true, &[("NO_COLOR", "1"), ("CLICOLOR_FORCE", "1")], false),
            (false, &[("CLICOLOR_FORCE", "1")], true),
            (false, &[("CLICOLOR_FORCE", "0")], false),
            (true, &[("CLICOLOR", "0")], false),
            (true, &[("TERM", "dumb")], false),
        ] {
            assert_eq!(colors(ColorChoice::Auto, is_terminal, variables), expected, "{variables:?}");
            assert!(colors(ColorChoice::Always, is_terminal, variables));
            assert!(!colors(ColorChoice::Never, is_terminal, variables));
        }
    }

    #[test]
    fn without_colors_text_is_plain() {
        assert_eq!(Style { colors: false }.paint(TextStyle::Bad, "error:"), "error:");
        assert_eq!(Style { colors: true }.paint(TextStyle::Bad, "error:"), "\u{1b}[1;31merror:\u{1b}[0m");
    }
}
