//! Results of credential programs, to explain why a registry refused access.

use std::sync::Arc;

use parking_lot::Mutex;

use super::credential::CredentialLocation;

/// The result of a program, without its output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ProgramResult {
    /// It returned a credential.
    Found,
    /// It has none.
    None,
    /// It failed; the error.
    Failed(String),
}

/// The last answer of each program for each repository. Cloning shares it.
#[derive(Debug, Clone, Default)]
pub struct ProgramResultLog(Arc<Mutex<Vec<ProgramResultEntry>>>);

#[derive(Debug)]
struct ProgramResultEntry {
    repository: String,
    program: CredentialLocation,
    answer: ProgramResult,
}

impl ProgramResultLog {
    /// The results for a normalised repository, in the order of the first requests.
    pub fn results_for(&self, repository: &str) -> Vec<(CredentialLocation, ProgramResult)> {
        let all = self.0.lock();
        let of_it = all.iter().filter(|noted| noted.repository == repository);
        of_it.map(|noted| (noted.program.clone(), noted.answer.clone())).collect()
    }

    pub(super) fn record(&self, repository: &str, program: CredentialLocation, answer: ProgramResult) {
        let mut all = self.0.lock();
        let known = all.iter_mut().find(|noted| noted.repository == repository && noted.program == program);
        match known {
            Some(noted) => noted.answer = answer,
            None => all.push(ProgramResultEntry { repository: repository.to_owned(), program, answer }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_answer_of_a_program_counts() {
        let answers = ProgramResultLog::default();
        let helper = || CredentialLocation::Helper("test".into());
        answers.record("r.example/a", helper(), ProgramResult::Failed("it hangs".into()));
        answers.record("r.example/b", helper(), ProgramResult::None);
        answers.record("r.example/a", helper(), ProgramResult::Found);
        assert_eq!(answers.results_for("r.example/a"), [(helper(), ProgramResult::Found)]);
        assert_eq!(answers.results_for("r.example/c"), []);
    }
}
