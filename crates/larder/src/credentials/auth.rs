//! The `auth` field of a docker config entry: `user:password` in base64.

use base64::Engine as _;
use base64::alphabet;
use base64::decoded_len_estimate;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use zeroize::Zeroizing;

use super::json;
use super::secret::Secret;

const fn engine(padding: DecodePaddingMode) -> GeneralPurpose {
    let config = GeneralPurposeConfig::new().with_decode_padding_mode(padding);
    GeneralPurpose::new(&alphabet::STANDARD, config.with_decode_allow_trailing_bits(true))
}

const PADDED: GeneralPurpose = engine(DecodePaddingMode::RequireCanonical);
const UNPADDED: GeneralPurpose = engine(DecodePaddingMode::RequireNone);

/// Why an `auth` field cannot be decoded. Never quotes the content.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum AuthError {
    /// Not base64, or padded wrongly, or with white space inside.
    #[error("not valid base64")]
    NotBase64,
    /// The decoded text has no colon.
    #[error("not the base64 of user:password")]
    NoColon,
}

/// User and password of an `auth` field.
///
/// Padding is required if the text, trimmed of white space, ends with `=`, and forbidden otherwise. Line breaks are
/// ignored wherever they are; other white space is an error. Bytes that are not UTF-8 become U+FFFD each.
pub fn decode_auth(auth: &str) -> Result<(String, Secret), AuthError> {
    let engine = if auth.trim().ends_with('=') { PADDED } else { UNPADDED };
    let mut digits = Zeroizing::new(String::with_capacity(auth.len()));
    digits.extend(auth.split(['\r', '\n']));
    let mut decoded = Zeroizing::new(vec![0; decoded_len_estimate(digits.len())]);
    let length = engine.decode_slice(digits.as_bytes(), &mut decoded).map_err(|_| AuthError::NotBase64)?;
    let text = json::text_of(&decoded[..length]);
    let (username, password) = text.split_once(':').ok_or(AuthError::NoColon)?;
    Ok((username.to_owned(), Secret::new(password)))
}

/// The `auth` field for a user and password, padded.
pub fn encode_auth(username: &str, password: &Secret) -> Secret {
    let password = password.reveal();
    let mut text = Zeroizing::new(String::with_capacity(username.len() + 1 + password.len()));
    text.extend([username, ":", password]);
    Secret::new(PADDED.encode(text.as_bytes()))
}
