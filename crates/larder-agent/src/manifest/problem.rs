//! Problems with an input, and their places.

use std::fmt;

use larder::hint::Hint;
use serde::Serialize;

/// One thing wrong with one input. It prints as `FIELD: MESSAGE`; [`LocatedProblem`] adds the rest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InputProblem {
    line: usize,
    field: String,
    message: String,
    hints: Vec<Hint>,
}

impl InputProblem {
    /// A problem whose place is not known yet.
    pub fn new(message: impl Into<String>) -> Self {
        InputProblem { line: 0, field: String::new(), message: message.into(), hints: Vec::new() }
    }

    /// Returns the problem on this line; 0 is no line.
    #[must_use]
    pub fn at_line(self, line: usize) -> Self {
        InputProblem { line, ..self }
    }

    /// The line within its document; 0 when not known.
    pub fn line(&self) -> usize {
        self.line
    }

    /// Returns the problem in this field.
    #[must_use]
    pub fn at_field(self, field: &str) -> Self {
        InputProblem { field: field.to_owned(), ..self }
    }

    /// Adds a next step.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<Hint>) -> Self {
        self.hints.push(hint.into());
        self
    }

    /// Adds next steps.
    #[must_use]
    pub fn hints(mut self, hints: impl IntoIterator<Item = impl Into<Hint>>) -> Self {
        self.hints.extend(hints.into_iter().map(Into::into));
        self
    }
}

impl fmt::Display for InputProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.field.is_empty() {
            write!(f, "{}: ", self.field)?;
        }
        f.write_str(&self.message)
    }
}

/// Where an input comes from.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct InputPlace {
    /// The file as the user named it, `standard input`, or `argument`.
    pub file: String,
    /// The document's number within the file, from 1; 0 for the file as a whole, and where a file is one document.
    pub document: usize,
    /// How many lines of the file come before the document.
    pub lines_before: usize,
    /// Kind and name of the document, such as `Pod default/web`; empty if unknown.
    pub what: String,
}

impl InputPlace {
    /// A file as a whole.
    pub fn file(name: impl Into<String>) -> Self {
        InputPlace { file: name.into(), ..InputPlace::default() }
    }

    /// Returns the problem with this place.
    pub fn locate(&self, problem: InputProblem) -> LocatedProblem {
        LocatedProblem { place: self.clone(), problem: Box::new(problem) }
    }

    /// The place with a line of the document, which may be 0.
    fn with_line(&self, line: usize) -> String {
        match (line, self.document) {
            (0, 0) => self.file.clone(),
            (line, 0) => format!("{}:{}", self.file, self.lines_before + line),
            (0, document) if self.what.is_empty() => format!("{}: document {document}", self.file),
            (0, document) => format!("{}: document {document} ({})", self.file, self.what),
            (line, document) => {
                let file_line = self.lines_before + line;
                let what = if self.what.is_empty() { String::new() } else { format!(" ({})", self.what) };
                format!("{}:{file_line}: document {document}{what}", self.file)
            }
        }
    }
}

impl fmt::Display for InputPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.with_line(0))
    }
}

/// A problem and the input it is in: `FILE:LINE: document 2 (Pod default/web): FIELD: MESSAGE`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LocatedProblem {
    place: InputPlace,
    problem: Box<InputProblem>,
}

impl LocatedProblem {
    /// Next steps.
    pub fn hints(&self) -> &[Hint] {
        &self.problem.hints
    }

    /// Returns the problem as data.
    pub fn as_data(&self) -> InputProblemRecord {
        let line = (self.problem.line > 0).then_some(self.place.lines_before + self.problem.line);
        InputProblemRecord {
            file: self.place.file.clone(),
            line,
            document: (self.place.document > 0).then_some(self.place.document),
            object: self.place.what.clone(),
            field: self.problem.field.clone(),
            message: self.problem.message.clone(),
            hints: self.problem.hints.iter().map(ToString::to_string).collect(),
        }
    }
}

impl fmt::Display for LocatedProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.place.with_line(self.problem.line), self.problem)
    }
}

/// A problem with an input, as `-o json` shows it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct InputProblemRecord {
    file: String,
    line: Option<usize>,
    document: Option<usize>,
    #[serde(serialize_with = "larder_api::or_null")]
    object: String,
    #[serde(serialize_with = "larder_api::or_null")]
    field: String,
    message: String,
    hints: Vec<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_problem_names_file_line_document_object_and_field() {
        let place = InputPlace {
            file: "app.yaml".into(),
            document: 2,
            lines_before: 10,
            what: "Pod default/web".into(),
        };
        let problem = InputProblem::new("\"Busybox\": repository name must be lowercase");
        assert_eq!(
            place.locate(problem.clone().at_line(3).at_field("spec.containers[0].image")).to_string(),
            "app.yaml:13: document 2 (Pod default/web): spec.containers[0].image: \
             \"Busybox\": repository name must be lowercase"
        );
        assert_eq!(
            place.locate(problem).to_string(),
            "app.yaml: document 2 (Pod default/web): \"Busybox\": repository name must be lowercase"
        );
        assert_eq!(
            InputPlace::file("app.yaml").locate(InputProblem::new("is empty")).to_string(),
            "app.yaml: is empty"
        );
    }
}
