//! `larder login` and `larder logout`: verifies credentials, and stores them where docker and podman read them.

use std::io;
use std::sync::Arc;

use larder::credentials::helpers::{CredentialHelpers, HelperError, HelperRequest};
use larder::credentials::{Credential, Secret, TokenPolicy};
use larder_agent::backend::providers;
use larder_agent::registry::{DockerLoginFile, FetchError, FetchErrorKind, LoginRegistry, LoginResult};

use crate::args::{LoginArgs, LogoutArgs};
use crate::credential_setup::read_password;
use crate::exit::CommandOutcome;
use crate::failure::{Failure, error_chain};
use crate::interrupt::{InterruptHandle, InterruptSignals};
use crate::printer::Printer;
use crate::session::{CommandSession, ImageAccess};
use crate::terminal;

pub(super) async fn log_in(
    args: &LoginArgs,
    session: &CommandSession,
    interrupt: InterruptSignals,
) -> Result<CommandOutcome, Failure> {
    let out = &session.out;
    let registry = LoginRegistry::parse(&args.registry)?;
    let file = DockerLoginFile::named_or_usual(args.file.authfile.as_deref())?;
    // A broken file fails before the prompt for a password.
    let known = file.read()?.user(&registry);
    let (_, config) = session.config(&ImageAccess::read().of_store())?;
    let client = args.tls.client(config.registry.clone());
    let interrupt = interrupt.handle();
    let credential = credential(args, &registry, known, &interrupt).await?;
    let login = interrupt.or(client.log_in(registry.host(), &credential)).await;
    match login.ok_or_else(Failure::interrupted)? {
        Ok(LoginResult::Accepted) => {}
        Ok(LoginResult::NotRequired) => out.warning(format_args!(
            "{} does not require authentication; credentials not verified",
            registry.host()
        )),
        Err(error) => return Err(refused(&registry, &error)),
    }
    let (username, password) = (credential.username.as_str(), &credential.password);
    let lock = file.lock()?;
    let mut logins = file.read()?;
    if let Some(helper) = logins.helper(&registry) {
        helpers().store(&helper, username, password).await.map_err(|error| of_helper(&error))?;
        logins.set(&registry, None);
    } else {
        logins.set(&registry, Some((username, password)));
        let path = file.path().display();
        out.info(format_args!(
            "note: the password is stored unencrypted in {path}; configure a credential helper (credsStore) to avoid that"
        ));
    }
    file.write(&logins, &lock)?;
    out.line("Login Succeeded");
    Ok(CommandOutcome::Done)
}

pub(super) async fn log_out(args: &LogoutArgs, out: &Arc<Printer>) -> Result<CommandOutcome, Failure> {
    let registry = LoginRegistry::parse(&args.registry)?;
    let file = DockerLoginFile::named_or_usual(args.file.authfile.as_deref())?;
    if !file.path().exists() {
        out.line(format_args!("not logged in to {}", registry.host()));
        return Ok(CommandOutcome::Done);
    }
    let lock = file.lock()?;
    let mut logins = file.read()?;
    let helper = logins.helper(&registry);
    let found = logins.remove(&registry);
    if found {
        file.write(&logins, &lock)?;
    }
    // The helper is last: a missing one must not leave a password in the file.
    if let Some(helper) = &helper {
        erase(helper, found).await?;
    }
    let result = if found || helper.is_some() { "logged out of" } else { "not logged in to" };
    out.line(format_args!("{result} {}", registry.host()));
    Ok(CommandOutcome::Done)
}

async fn erase(helper: &HelperRequest, found: bool) -> Result<(), Failure> {
    let erased = helpers().erase(helper).await;
    erased.map_err(|error| {
        let of_file =
            if found { "the credentials in the file were removed" } else { "the file has no credentials" };
        Failure::failed(error.to_string()).hint(format!(
            "fix the helper (credsStore or credHelpers in the file), which may still have the password; {of_file}"
        ))
    })
}

fn helpers() -> CredentialHelpers {
    providers::helpers(TokenPolicy::Keep).unwrap_or_else(|| CredentialHelpers::on_path("".as_ref()))
}

fn of_helper(error: &HelperError) -> Failure {
    Failure::failed(error.to_string())
        .hint("fix the helper, or remove it from credsStore or credHelpers in the file; wrote nothing")
}

/// User name and password, from flags and prompts.
async fn credential(
    args: &LoginArgs,
    registry: &LoginRegistry,
    known: Option<String>,
    interrupt: &InterruptHandle,
) -> Result<Credential, Failure> {
    let host = registry.host();
    let username = if let Some(username) = &args.username {
        username.clone()
    } else {
        let known_name = known.as_ref().map_or_else(String::new, |known| format!(" ({known})"));
        let question = format!("Username for {host}{known_name}: ");
        let answer = terminal::ask(&question, false, interrupt).await?;
        match (answer.reveal().trim(), known) {
            ("", Some(known)) => known,
            (answer, _) => answer.to_owned(),
        }
    };
    if username.is_empty() || username.contains(':') || username.contains(char::is_control) {
        return Err(Failure::bad_input(
            "invalid user name: it is empty, or has a colon or a control character",
        ));
    }
    let password = if args.password_stdin {
        read_password(io::stdin().lock(), "larder login -u USER --password-stdin REGISTRY")?
    } else {
        terminal::ask(&format!("Password for {username} at {host}: "), true, interrupt).await?
    };
    if password.is_empty() {
        return Err(Failure::bad_input("the password is empty"));
    }
    Ok(Credential { username, password: Secret::new(password.reveal()), ..Credential::default() })
}

fn refused(registry: &LoginRegistry, error: &FetchError) -> Failure {
    let host = registry.host();
    if let FetchErrorKind::Denied(answer) | FetchErrorKind::CredentialRejected(answer) = &*error.kind {
        return Failure::failed(format!("{host} rejected the credentials: {answer}"))
            .hint("check user and password; many registries require a token as password; wrote nothing");
    }
    Failure::failed(format!("cannot log in to {host}: {}", error_chain(error))).hints(error.hint())
}
