//! Verifies the certificate of a server as Go's `crypto/x509` does, which containerd, docker and podman use.
//!
//! webpki builds the chain, and checks signatures, validity and name constraints. Go differs from it:
//!
//! - A certificate that is itself trusted needs no issuer.
//! - A server may present a certificate that may also sign others (`CA:TRUE`), as `openssl req -x509` makes it.
//! - A trusted certificate that has expired, that may not sign or that is for another use is no issuer.
//! - The extended key usage "any" includes servers.
//!
//! Stricter than Go is the choice of keys: none of RSA below 2048 bits, none of P-224 and P-521.

use std::cell::RefCell;
use std::fmt;
use std::sync::Arc;

use larder::escape::escape_cell;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::{
    AlgorithmIdentifier, CertificateDer, InvalidSignature, ServerName, SignatureVerificationAlgorithm,
    TrustAnchor, UnixTime,
};
use rustls::{CertificateError, DigitallySignedStruct, OtherError, SignatureScheme};
use webpki::{
    EndEntityCert, ExtendedKeyUsageValidator, KeyPurposeIdIter, RequiredEkuNotFoundContext, VerifiedPath,
};
use x509_cert::certificate::{CertificateInner, Raw, Version};
use x509_cert::der::oid::{AssociatedOid as _, ObjectIdentifier};
use x509_cert::der::{Decode as _, Encode as _, Header, Reader as _, SliceReader};
use x509_cert::ext::pkix::name::GeneralName;
use x509_cert::ext::pkix::{BasicConstraints, ExtendedKeyUsage, KeyUsage, SubjectAltName};
use x509_cert::name::Name;
use x509_cert::time::Time;

use super::problem::{CertificateProblem, words};

/// Extended key usages that include servers: for servers, and any.
const FOR_SERVERS: [ObjectIdentifier; 2] =
    [ObjectIdentifier::new_unwrap("1.3.6.1.5.5.7.3.1"), ObjectIdentifier::new_unwrap("2.5.29.37.0")];

/// Lenient, as Go is with serial numbers and encodings of times.
type Certificate = CertificateInner<Raw>;

/// Accepts the certificates that Go's `crypto/x509` accepts.
#[derive(Debug)]
pub(super) struct GoVerifier {
    provider: Arc<CryptoProvider>,
    trusted: Vec<CertificateDer<'static>>,
    /// Of `trusted`, in its order.
    anchors: Vec<TrustAnchor<'static>>,
}

impl GoVerifier {
    /// Trusts the given certificates; those that cannot be parsed are left out, as Go does.
    pub(super) fn new(
        trusted: impl IntoIterator<Item = CertificateDer<'static>>,
        provider: Arc<CryptoProvider>,
    ) -> GoVerifier {
        let (trusted, anchors) = trusted
            .into_iter()
            .filter_map(|certificate| {
                let anchor = webpki::anchor_from_trusted_cert(&certificate).ok()?.to_owned();
                Some((certificate, anchor))
            })
            .unzip();
        GoVerifier { provider, trusted, anchors }
    }

    pub(super) fn verify(
        &self,
        server: &CertificateDer<'_>,
        sent: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        now: UnixTime,
    ) -> Result<(), CertificateProblem> {
        let certificate = parse(server)?;
        check_validity(&certificate, now)?;
        let names = names_of(&certificate)?;
        let mut end_entity_bytes = server.to_vec();
        clear_ca(&mut end_entity_bytes, &certificate);
        let end_entity_der = CertificateDer::from(end_entity_bytes);
        let end_entity =
            EndEntityCert::try_from(&end_entity_der).map_err(|error| problem(&error, &certificate))?;
        end_entity
            .verify_is_valid_for_subject_name(name)
            .map_err(|_| CertificateProblem::WrongName { asked: name.to_str().into_owned(), names })?;
        if self.trusted.iter().any(|trusted| trusted == server) {
            return check_usage(&certificate);
        }
        let signed = (signed_part(&end_entity_der)?, signed_part(server)?);
        let algorithms: Vec<_> = self
            .provider
            .signature_verification_algorithms
            .all
            .iter()
            .map(|algorithm| OriginalSignature { algorithm: *algorithm, signed })
            .collect();
        let algorithms: Vec<_> = algorithms.iter().map(|algorithm| algorithm as _).collect();
        let refused_path = RefCell::new(None);
        let check_path = |path: &VerifiedPath<'_>| {
            self.check_path(path, now).map_err(|problem| {
                refused_path.replace(Some(problem));
                webpki::Error::UnknownIssuer
            })
        };
        let path = end_entity.verify_for_usage(
            &algorithms,
            &self.anchors,
            sent,
            now,
            ServerUsage,
            None,
            Some(&check_path),
        );
        match path {
            Ok(_) => Ok(()),
            Err(error) => Err(refused_path.into_inner().unwrap_or_else(|| problem(&error, &certificate))),
        }
    }

    /// Checks what webpki does not check of the issuers in a path.
    fn check_path(&self, path: &VerifiedPath<'_>, now: UnixTime) -> Result<(), CertificateProblem> {
        let mut intermediates = 0;
        for issuer in path.intermediate_certificates() {
            check_may_sign(&parse(&issuer.der())?)?;
            intermediates += 1;
        }
        let Some(at) = self.anchors.iter().position(|anchor| std::ptr::eq(anchor, path.anchor())) else {
            return Err(CertificateProblem::Invalid("its issuer is unknown".to_owned()));
        };
        let root = parse(&self.trusted[at])?;
        let subject = || text_of(root.tbs_certificate().subject());
        check_validity(&root, now).map_err(|problem| match problem {
            CertificateProblem::Expired(at) => CertificateProblem::IssuerExpired { issuer: subject(), at },
            other => other,
        })?;
        check_may_sign(&root)?;
        let limit = basic_constraints(&root)?.and_then(|constraints| constraints.path_len_constraint);
        if limit.is_some_and(|limit| intermediates > usize::from(limit)) {
            return Err(CertificateProblem::NotCa(subject()));
        }
        check_usage(&root)
    }
}

fn parse(der: &CertificateDer<'_>) -> Result<Certificate, CertificateProblem> {
    Certificate::from_der(der).map_err(|error| invalid(&error))
}

fn invalid(error: &dyn fmt::Display) -> CertificateProblem {
    CertificateProblem::Invalid(error.to_string())
}

fn text_of(name: &Name) -> String {
    let text = escape_cell(&name.to_string());
    if text.is_empty() { "a CA without a name".to_owned() } else { text }
}

fn check_validity(certificate: &Certificate, now: UnixTime) -> Result<(), CertificateProblem> {
    let validity = certificate.tbs_certificate().validity();
    let seconds = |time: &Time| time.to_unix_duration().as_secs();
    let text = |time: &Time| time.to_date_time().to_string();
    if now.as_secs() < seconds(&validity.not_before) {
        Err(CertificateProblem::NotYetValid(text(&validity.not_before)))
    } else if now.as_secs() > seconds(&validity.not_after) {
        Err(CertificateProblem::Expired(text(&validity.not_after)))
    } else {
        Ok(())
    }
}

/// The names and addresses in a certificate, for messages.
fn names_of(certificate: &Certificate) -> Result<Vec<String>, CertificateProblem> {
    let extension = certificate.tbs_certificate().get_extension::<SubjectAltName>();
    let Some((_, names)) = extension.map_err(|error| invalid(&error))? else {
        return Err(CertificateProblem::NoName);
    };
    let texts = names.0.iter().filter_map(|name| match name {
        GeneralName::DnsName(name) => Some(escape_cell(name.as_str())),
        GeneralName::IpAddress(address) => {
            let bytes = address.as_bytes();
            let v4 = <[u8; 4]>::try_from(bytes).map(std::net::IpAddr::from);
            v4.or_else(|_| <[u8; 16]>::try_from(bytes).map(std::net::IpAddr::from))
                .ok()
                .map(|ip| ip.to_string())
        }
        _ => None,
    });
    let texts: Vec<_> = texts.collect();
    Ok(if texts.is_empty() { vec!["no server".to_owned()] } else { texts })
}

fn basic_constraints(certificate: &Certificate) -> Result<Option<BasicConstraints>, CertificateProblem> {
    let extension = certificate.tbs_certificate().get_extension::<BasicConstraints>();
    Ok(extension.map_err(|error| invalid(&error))?.map(|(_, constraints)| constraints))
}

fn check_usage(certificate: &Certificate) -> Result<(), CertificateProblem> {
    let usage = certificate.tbs_certificate().get_extension::<ExtendedKeyUsage>();
    match usage.map_err(|error| invalid(&error))? {
        Some((_, usages)) if !usages.0.iter().any(|usage| FOR_SERVERS.contains(usage)) => {
            Err(CertificateProblem::WrongUsage)
        }
        _ => Ok(()),
    }
}

/// Checks that a certificate may sign others. Older versions than 3 have no field for it.
fn check_may_sign(certificate: &Certificate) -> Result<(), CertificateProblem> {
    let content = certificate.tbs_certificate();
    let is_ca = match basic_constraints(certificate)? {
        Some(constraints) => constraints.ca,
        None => content.version() != Version::V3,
    };
    let usage = content.get_extension::<KeyUsage>().map_err(|error| invalid(&error))?;
    if is_ca && usage.is_none_or(|(_, usage)| usage.key_cert_sign()) {
        Ok(())
    } else {
        Err(CertificateProblem::NotCa(text_of(content.subject())))
    }
}

/// Changes `CA:TRUE` of a server's certificate to `CA:FALSE`: webpki refuses it otherwise. [`OriginalSignature`]
/// verifies the signature of what the server sent.
fn clear_ca(der: &mut [u8], certificate: &Certificate) {
    let extensions = certificate.tbs_certificate().extensions().into_iter().flatten();
    let Some(extension) = extensions.into_iter().find(|extension| extension.extn_id == BasicConstraints::OID)
    else {
        return;
    };
    let (Ok(encoded), value) = (extension.to_der(), extension.extn_value.as_bytes()) else { return };
    // A sequence that starts with a boolean.
    let [0x30, _, 0x01, 0x01, 0xff, ..] = value else { return };
    let mut places = der.windows(encoded.len()).enumerate().filter(|(_, bytes)| *bytes == encoded);
    // Of two places, one is not the extension: then the certificate stays refused.
    if let (Some((at, _)), None) = (places.next(), places.next()) {
        der[at + encoded.len() - value.len() + 4] = 0;
    }
}

/// The part of a certificate that is signed.
fn signed_part<'a>(der: &'a CertificateDer<'_>) -> Result<&'a [u8], CertificateProblem> {
    let mut reader = SliceReader::new(der).map_err(|error| invalid(&error))?;
    Header::decode(&mut reader).map_err(|error| invalid(&error))?;
    reader.tlv_bytes().map_err(|error| invalid(&error))
}

/// Verifies the original of a certificate that [`clear_ca`] has changed.
#[derive(Debug)]
struct OriginalSignature<'a> {
    algorithm: &'static dyn SignatureVerificationAlgorithm,
    /// The signed part as changed, and its original.
    signed: (&'a [u8], &'a [u8]),
}

impl SignatureVerificationAlgorithm for OriginalSignature<'_> {
    fn verify_signature(&self, key: &[u8], message: &[u8], signature: &[u8]) -> Result<(), InvalidSignature> {
        let (changed, original) = self.signed;
        let message = if message == changed { original } else { message };
        self.algorithm.verify_signature(key, message, signature)
    }

    fn public_key_alg_id(&self) -> AlgorithmIdentifier {
        self.algorithm.public_key_alg_id()
    }

    fn signature_alg_id(&self) -> AlgorithmIdentifier {
        self.algorithm.signature_alg_id()
    }
}

/// Accepts certificates without extended key usages, and those for servers or for any use.
struct ServerUsage;

impl ExtendedKeyUsageValidator for ServerUsage {
    fn validate(&self, usages: KeyPurposeIdIter<'_, '_>) -> Result<(), webpki::Error> {
        let present =
            usages.map(|usage| Ok(usage?.to_decoded_oid())).collect::<Result<Vec<_>, webpki::Error>>()?;
        let is_for_servers = |usage: &Vec<usize>| {
            FOR_SERVERS.iter().any(|oid| oid.arcs().map(|arc| arc as usize).eq(usage.iter().copied()))
        };
        if present.is_empty() || present.iter().any(is_for_servers) {
            return Ok(());
        }
        let required = webpki::KeyUsage::server_auth();
        Err(webpki::Error::RequiredEkuNotFoundContext(RequiredEkuNotFoundContext { required, present }))
    }
}

/// The problem that webpki found in a certificate or its chain.
fn problem(error: &webpki::Error, certificate: &Certificate) -> CertificateProblem {
    let content = certificate.tbs_certificate();
    let issuer = || text_of(content.issuer());
    match error {
        webpki::Error::InvalidSignatureForPublicKey => CertificateProblem::OtherKey(issuer()),
        webpki::Error::UnknownIssuer => {
            if content.issuer() == content.subject() {
                CertificateProblem::SelfSigned
            } else {
                CertificateProblem::UnknownIssuer(issuer())
            }
        }
        webpki::Error::CertExpired { not_after, .. } => CertificateProblem::IssuerExpired {
            issuer: issuer(),
            at: Time::try_from(std::time::UNIX_EPOCH + std::time::Duration::from_secs(not_after.as_secs()))
                .map(|time| time.to_date_time().to_string())
                .unwrap_or_default(),
        },
        webpki::Error::EndEntityUsedAsCa | webpki::Error::PathLenConstraintViolated => {
            CertificateProblem::NotCa(issuer())
        }
        webpki::Error::RequiredEkuNotFoundContext(_) => CertificateProblem::WrongUsage,
        webpki::Error::NameConstraintViolation => CertificateProblem::NameConstraint,
        webpki::Error::UnsupportedSignatureAlgorithmContext(_)
        | webpki::Error::UnsupportedSignatureAlgorithmForPublicKeyContext(_) => {
            CertificateProblem::UnsupportedSignature(format!("signed by {}", issuer()))
        }
        other => {
            let name = format!("{other:?}");
            CertificateProblem::Invalid(words(name.split(['(', ' ']).next().unwrap_or_default()))
        }
    }
}

impl ServerCertVerifier for GoVerifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        _: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        self.verify(end_entity, intermediates, server_name, now)
            .map(|()| ServerCertVerified::assertion())
            .map_err(|problem| CertificateError::Other(OtherError(Arc::new(problem))).into())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls12_signature(
            message,
            certificate,
            signature,
            &self.provider.signature_verification_algorithms,
        )
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(
            message,
            certificate,
            signature,
            &self.provider.signature_verification_algorithms,
        )
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}
