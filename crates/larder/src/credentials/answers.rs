//! What the programs that were asked for credentials answered: for whoever explains why a registry refused.

use std::sync::{Arc, Mutex, PoisonError};

use super::credential::Origin;

/// How a program answered. Says nothing of what it wrote.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer {
    /// It gave a credential.
    Gave,
    /// It has none.
    None,
    /// It gave no answer; why.
    Failed(String),
}

/// The last answer of each program for each repository. Cloning shares it.
#[derive(Debug, Clone, Default)]
pub struct Answers(Arc<Mutex<Vec<Noted>>>);

#[derive(Debug)]
struct Noted {
    repository: String,
    program: Origin,
    answer: Answer,
}

impl Answers {
    /// What the programs answered for a normalised repository, in the order in which they were first asked.
    pub fn of(&self, repository: &str) -> Vec<(Origin, Answer)> {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let of_it = all.iter().filter(|noted| noted.repository == repository);
        of_it.map(|noted| (noted.program.clone(), noted.answer.clone())).collect()
    }

    pub(super) fn note(&self, repository: &str, program: Origin, answer: Answer) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let known = all.iter_mut().find(|noted| noted.repository == repository && noted.program == program);
        match known {
            Some(noted) => noted.answer = answer,
            None => all.push(Noted { repository: repository.to_owned(), program, answer }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_answer_of_a_program_counts() {
        let answers = Answers::default();
        let helper = || Origin::Helper("test".into());
        answers.note("r.example/a", helper(), Answer::Failed("it hangs".into()));
        answers.note("r.example/b", helper(), Answer::None);
        answers.note("r.example/a", helper(), Answer::Gave);
        assert_eq!(answers.of("r.example/a"), [(helper(), Answer::Gave)]);
        assert_eq!(answers.of("r.example/c"), []);
    }
}
