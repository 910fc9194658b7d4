//! Gives a helper a password to keep, and has one forgotten.

use zeroize::Zeroizing;

use super::choose::Asked;
use super::{HelperError, Helpers, answer};
use crate::credentials::json;
use crate::credentials::program::{self, Program};
use crate::credentials::secret::Secret;

impl Helpers {
    /// Gives the helper this login to keep.
    pub async fn store(&self, at: &Asked, username: &str, secret: &Secret) -> Result<(), HelperError> {
        let fields = [("ServerURL", at.server.as_str()), ("Username", username), ("Secret", secret.reveal())];
        // Room for all of it, escaped: a text that grows leaves copies behind that nobody overwrites.
        let room = fields.iter().map(|(name, value)| name.len() + 6 * value.len() + 8).sum::<usize>();
        let mut text = Zeroizing::new(String::with_capacity(room));
        text.push('{');
        json::push_fields(&mut text, &fields);
        text.push('}');
        self.change("store", at, Zeroizing::new(text.as_bytes().to_vec())).await
    }

    /// Has the helper forget what it has for a server. It is no error if that is nothing.
    pub async fn erase(&self, at: &Asked) -> Result<(), HelperError> {
        self.change("erase", at, Zeroizing::new(at.server.as_bytes().to_vec())).await
    }

    async fn change(
        &self,
        verb: &'static str,
        at: &Asked,
        input: Zeroizing<Vec<u8>>,
    ) -> Result<(), HelperError> {
        let Asked { helper: name, server } = at.clone();
        let path = super::found(self.folders.clone(), &name).await?;
        let args = [verb.to_owned()];
        let run = Program { path: &path, args: &args, env: Vec::new(), input };
        let ended = program::run(run).await;
        let ended =
            ended.map_err(|error| HelperError::Run { name: name.clone(), problem: error.to_string() })?;
        if ended.status.success() || (verb == "erase" && answer::says_none(&ended.stdout)) {
            return Ok(());
        }
        Err(HelperError::Change { name, verb, server, status: ended.status.to_string() })
    }
}
