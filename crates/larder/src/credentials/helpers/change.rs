//! Stores and erases credentials in a helper.

use zeroize::Zeroizing;

use super::helper_selection::HelperRequest;
use super::{CredentialHelpers, HelperError, helper_output};
use crate::credentials::json;
use crate::credentials::program::{self, ProgramCommand};
use crate::credentials::secret::Secret;

impl CredentialHelpers {
    /// Stores this login in the helper.
    pub async fn store(
        &self,
        at: &HelperRequest,
        username: &str,
        secret: &Secret,
    ) -> Result<(), HelperError> {
        let fields = [("ServerURL", at.server.as_str()), ("Username", username), ("Secret", secret.reveal())];
        let text = json::encode_fields(&fields);
        self.change("store", at, Zeroizing::new(text.reveal().as_bytes().to_vec())).await
    }

    /// Erases the helper's credential for a server. Succeeds if there is none.
    pub async fn erase(&self, at: &HelperRequest) -> Result<(), HelperError> {
        self.change("erase", at, Zeroizing::new(at.server.as_bytes().to_vec())).await
    }

    async fn change(
        &self,
        verb: &'static str,
        at: &HelperRequest,
        input: Zeroizing<Vec<u8>>,
    ) -> Result<(), HelperError> {
        let HelperRequest { helper: name, server } = at.clone();
        let path = super::found(self.dirs.clone(), &name).await?;
        let args = [verb.to_owned()];
        let run = ProgramCommand { path: &path, args: &args, env: Vec::new(), input };
        let ended = program::run(run).await;
        let ended =
            ended.map_err(|error| HelperError::Run { name: name.clone(), problem: error.to_string() })?;
        if ended.status.success() || (verb == "erase" && helper_output::is_not_found(&ended.stdout)) {
            return Ok(());
        }
        Err(HelperError::Change { name, verb, server, status: ended.status.to_string() })
    }
}
