//! Why a TLS connection failed, in words.

use std::error::Error;

use larder::escape::escape_cell;
use rustls::{AlertDescription, CertificateError, InvalidMessage};

/// Why a TLS connection to a server failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TlsProblem {
    /// The server's certificate is refused.
    #[error(transparent)]
    Certificate(#[from] CertificateProblem),
    /// The answer is not TLS.
    #[error("the server speaks plain HTTP on this port, not TLS")]
    PlainHttp,
    /// Plain HTTP was sent to a server of TLS.
    #[error("the server speaks TLS on this port, not plain HTTP")]
    NotPlainHttp,
    /// The server requires a client certificate, and none was sent.
    #[error("the server requires a client certificate")]
    NoClientCertificate,
    /// The server rejected the client certificate.
    #[error("the server rejected the client certificate ({0}), or requires one")]
    ClientCertificate(String),
    /// Client and server have no version, cipher suite or kind of key in common.
    #[error("no TLS version, cipher suite or kind of key in common with the server: {0}")]
    Incompatible(String),
    /// The problem is with a server that the registry redirects to.
    #[error("redirected to {to}: {problem}")]
    Redirected {
        /// `HOST` or `HOST:PORT`.
        to: String,
        /// Its problem.
        problem: Box<TlsProblem>,
    },
    /// Another failure.
    #[error("{0}")]
    Other(String),
}

/// Why the certificate of a server is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CertificateProblem {
    /// Its time has passed.
    #[error("the server's certificate expired at {0}")]
    Expired(String),
    /// Its time has not begun.
    #[error("the server's certificate is not valid before {0}")]
    NotYetValid(String),
    /// It is for other names.
    #[error("the server's certificate is for {}, not for {asked}", .names.join(", "))]
    WrongName {
        /// The name or address of the server.
        asked: String,
        /// Those in the certificate.
        names: Vec<String>,
    },
    /// It has only a common name, which counts no more.
    #[error("the server's certificate has no subject alternative name; its common name is not used")]
    NoName,
    /// It is its own issuer, and not trusted.
    #[error("the server's certificate is self-signed and not trusted")]
    SelfSigned,
    /// No trusted certificate has issued it or its chain.
    #[error("the server's certificate was issued by {0}, which is not trusted")]
    UnknownIssuer(String),
    /// A trusted certificate has the name of the issuer, and another key.
    #[error(
        "the server's certificate was not signed with the key of the trusted CA {0}: it has another key (or an RSA key below 2048 bits)"
    )]
    OtherKey(String),
    /// The trusted certificate that issued it has expired.
    #[error("the CA certificate of {issuer} expired at {at}")]
    IssuerExpired {
        /// Subject of the issuer.
        issuer: String,
        /// End of its validity.
        at: String,
    },
    /// A certificate of the chain may not issue others.
    #[error("the server's certificate was issued by {0}, whose certificate is none of a CA")]
    NotCa(String),
    /// It is not for servers.
    #[error("the server's certificate is not one for servers (extended key usage)")]
    WrongUsage,
    /// A CA of the chain may not issue for this name.
    #[error("the server's certificate has a name that its CA may not issue (name constraints)")]
    NameConstraint,
    /// The chain has a signature of an unsupported kind.
    #[error("the server's certificate is signed with an algorithm or a key that is not supported: {0}")]
    UnsupportedSignature(String),
    /// The server's signature does not match the key of its certificate; none matches an RSA key below 2048 bits.
    #[error("the server's certificate has an RSA key below 2048 bits, or the server has another key")]
    WeakKey,
    /// It cannot be used for another reason.
    #[error("the server's certificate cannot be used: {0}")]
    Invalid(String),
}

impl TlsProblem {
    /// Returns the TLS problem that caused an error, if there is one.
    pub fn behind(error: &(dyn Error + 'static)) -> Option<TlsProblem> {
        if let Some(error) = error.downcast_ref::<rustls::Error>() {
            return Some(TlsProblem::of(error));
        }
        // Errors of the handshake are wrapped in I/O errors, possibly several times, and are not their sources.
        let carried = error.downcast_ref::<std::io::Error>().and_then(std::io::Error::get_ref);
        carried.and_then(|inner| TlsProblem::behind(inner)).or_else(|| TlsProblem::behind(error.source()?))
    }

    fn of(error: &rustls::Error) -> TlsProblem {
        match error {
            rustls::Error::InvalidCertificate(CertificateError::Other(other)) => {
                match other.0.downcast_ref::<CertificateProblem>() {
                    Some(problem) => TlsProblem::Certificate(problem.clone()),
                    None => TlsProblem::Other(escape_cell(&other.to_string())),
                }
            }
            rustls::Error::InvalidCertificate(CertificateError::BadSignature) => {
                TlsProblem::Certificate(CertificateProblem::WeakKey)
            }
            rustls::Error::InvalidMessage(InvalidMessage::InvalidContentType) => TlsProblem::PlainHttp,
            rustls::Error::AlertReceived(AlertDescription::CertificateRequired) => {
                TlsProblem::NoClientCertificate
            }
            rustls::Error::AlertReceived(
                alert @ (AlertDescription::BadCertificate
                | AlertDescription::UnsupportedCertificate
                | AlertDescription::CertificateRevoked
                | AlertDescription::CertificateExpired
                | AlertDescription::CertificateUnknown
                | AlertDescription::UnknownCA
                | AlertDescription::AccessDenied),
            ) => TlsProblem::ClientCertificate(words(&format!("{alert:?}"))),
            rustls::Error::AlertReceived(
                alert @ (AlertDescription::HandshakeFailure | AlertDescription::ProtocolVersion),
            ) => TlsProblem::Incompatible(words(&format!("{alert:?}"))),
            rustls::Error::PeerIncompatible(problem) => {
                TlsProblem::Incompatible(words(&format!("{problem:?}")))
            }
            other => TlsProblem::Other(other.to_string()),
        }
    }
}

/// A name of rustls or webpki in words: `UnknownCA` is `unknown CA`.
pub(super) fn words(name: &str) -> String {
    let mut words = String::new();
    let mut letters = name.chars().peekable();
    let mut previous_lower = false;
    while let Some(letter) = letters.next() {
        let starts_word = letter.is_uppercase() && (previous_lower || words.is_empty());
        if starts_word && !words.is_empty() {
            words.push(' ');
        }
        let is_acronym = letters.peek().is_none_or(|next| next.is_uppercase());
        previous_lower = !letter.is_uppercase();
        if starts_word && !is_acronym {
            words.extend(letter.to_lowercase());
        } else {
            words.push(letter);
        }
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn alerts_are_words() {
        for (name, text) in [
            ("UnknownCA", "unknown CA"),
            ("BadCertificate", "bad certificate"),
            ("HandshakeFailure", "handshake failure"),
            ("ProtocolVersion", "protocol version"),
        ] {
            assert_eq!(words(name), text);
        }
    }

    #[test]
    fn no_problem_has_a_name_of_the_tls_library() {
        use AlertDescription as Alert;
        for error in [
            rustls::Error::InvalidMessage(InvalidMessage::InvalidContentType),
            rustls::Error::InvalidCertificate(CertificateError::BadSignature),
            rustls::Error::AlertReceived(Alert::CertificateRequired),
            rustls::Error::AlertReceived(Alert::UnknownCA),
            rustls::Error::AlertReceived(Alert::HandshakeFailure),
        ] {
            let wrapped = std::io::Error::other(std::io::Error::other(error));
            let text = TlsProblem::behind(&wrapped).unwrap().to_string();
            let is_word =
                |word: &str| !word.chars().skip(1).any(char::is_uppercase) || word.to_uppercase() == word;
            assert!(text.split([' ', '(', ')', ',']).all(is_word), "{text}");
        }
        assert_eq!(TlsProblem::behind(&std::io::Error::other("refused")), None);
    }
}
