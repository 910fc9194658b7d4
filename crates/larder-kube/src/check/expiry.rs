//! Until when a client certificate or a token is valid.

use std::path::Path;

use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use k8s_openapi::jiff::Timestamp;
use kube::config::AuthInfo;
use serde_json::Value;

use super::human;
use super::steps::Role;
use crate::cluster::ClusterOptions;
use crate::kubeconfig::{KubeconfigState, certificate, current_user};

/// The token of the pod that larder runs in.
const POD_TOKEN: &str = "/var/run/secrets/kubernetes.io/serviceaccount/token";

/// Says until when the credentials are valid, or that they have expired.
pub(super) async fn of_kubeconfig(
    options: &ClusterOptions,
    role: Role,
    state: &KubeconfigState,
    now: Timestamp,
) -> Result<String, (String, Option<String>)> {
    let path = options.kubeconfig.clone();
    // It fails only when the runtime stops.
    let found = tokio::task::spawn_blocking(move || read(path.as_deref())).await.unwrap_or_default();
    let place = options.kubeconfig.as_deref().unwrap_or(Path::new(POD_TOKEN)).display();
    describe(found, now)
        .map(|found| format!("{place}: {found}"))
        .map_err(|found| (format!("{place}: {found}"), Some(role.renew(options, state))))
}

fn describe(found: Option<(&'static str, Timestamp)>, now: Timestamp) -> Result<String, String> {
    let Some((kind, end)) = found else { return Ok("its expiry is unknown".to_owned()) };
    let left = end.duration_since(now).as_secs();
    if left <= 0 {
        Err(format!("{kind} has expired {} ago", human(-left)))
    } else {
        Ok(format!("{kind} expires in {}", human(left)))
    }
}

fn read(kubeconfig: Option<&Path>) -> Option<(&'static str, Timestamp)> {
    let Some(path) = kubeconfig else {
        return Some(("token", token_expiry(&fs_err::read_to_string(POD_TOKEN).ok()?)?));
    };
    let user = current_user(path)?;
    if let Some(pem) = certificate(&user) {
        return Some(("certificate", certificate_expiry(&pem)?));
    }
    // A token is never printed, only when it ends.
    let token = match &user.token_file {
        Some(file) => fs_err::read_to_string(file).ok()?,
        None => token_of(&user)?,
    };
    Some(("token", token_expiry(&token)?))
}

fn token_of(user: &AuthInfo) -> Option<String> {
    let value = serde_json::to_value(user).ok()?;
    value["token"].as_str().map(str::to_owned)
}

/// The `exp` of a JSON web token.
fn token_expiry(token: &str) -> Option<Timestamp> {
    let claims: Value =
        serde_json::from_slice(&URL_SAFE_NO_PAD.decode(token.trim().split('.').nth(1)?).ok()?).ok()?;
    Timestamp::from_second(claims["exp"].as_i64()?).ok()
}

/// `notAfter` of the first certificate.
fn certificate_expiry(pem: &str) -> Option<Timestamp> {
    let body = pem.split_once("-----BEGIN CERTIFICATE-----")?.1.split_once("-----END")?.0;
    let body: String = body.split_whitespace().collect();
    let der = STANDARD.decode(body).ok()?;
    // Two times in a row are the validity, the first of which comes before any other time.
    (0..der.len()).find_map(|at| {
        let (_, rest) = der_time(&der[at..])?;
        Some(der_time(rest)?.0)
    })
}

/// A `UTCTime` or `GeneralizedTime` of DER, and what follows it.
fn der_time(der: &[u8]) -> Option<(Timestamp, &[u8])> {
    let (text, century, rest) = match der {
        [0x17, 13, rest @ ..] => (rest.get(..13)?, true, rest.get(13..)?),
        [0x18, 15, rest @ ..] => (rest.get(..15)?, false, rest.get(15..)?),
        _ => return None,
    };
    let text = std::str::from_utf8(text).ok()?.strip_suffix('Z')?;
    // A year of two digits from 50 on is of the last century.
    let year = match century {
        true if text >= "50" => "19",
        true => "20",
        false => "",
    };
    let text = format!("{year}{text}");
    let part = |from: usize, to: usize| text.get(from..to);
    let time = format!(
        "{}-{}-{}T{}:{}:{}Z",
        part(0, 4)?,
        part(4, 6)?,
        part(6, 8)?,
        part(8, 10)?,
        part(10, 12)?,
        part(12, 14)?
    );
    Some((time.parse().ok()?, rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_validity_of_a_certificate_and_of_a_token_is_found() {
        let der = b"\x30\x82name\x30\x1e\x17\x0d260101000000Z\x18\x0f20500203040506Z\x30more";
        let pem =
            format!("-----BEGIN CERTIFICATE-----\n{}\n-----END CERTIFICATE-----\n", STANDARD.encode(der));
        assert_eq!(certificate_expiry(&pem).unwrap().to_string(), "2050-02-03T04:05:06Z");
        let token = format!("e30.{}.sig", URL_SAFE_NO_PAD.encode(r#"{"exp":1000}"#));
        assert_eq!(token_expiry(&token).unwrap().as_second(), 1000);
        assert_eq!(token_expiry("opaque"), None);
    }

    #[test]
    fn credentials_that_have_expired_are_a_failure() {
        let now = Timestamp::from_second(10_000).unwrap();
        let at = |seconds| Some(("token", Timestamp::from_second(seconds).unwrap()));
        assert_eq!(describe(at(9_990), now).unwrap_err(), "token has expired 10s ago");
        assert_eq!(describe(at(13_600), now).unwrap(), "token expires in 60m");
        assert_eq!(describe(None, now).unwrap(), "its expiry is unknown");
    }
}
