//! Which certificates are accepted, and what is said of the others.

use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use larder_testkit_peers::tls::CertificateRequest;
use larder_testkit_peers::{Package, require};
use tempfile::TempDir;

use super::*;

const CA: &[&str] = &["basicConstraints=critical,CA:TRUE", "keyUsage=critical,keyCertSign"];
const SERVER: &[&str] = &["basicConstraints=critical,CA:FALSE", "subjectAltName=DNS:reg.test"];
/// As `openssl req -x509` makes it with its usual configuration.
const SELF_SIGNED: &[&str] =
    &["basicConstraints=critical,CA:TRUE", "subjectAltName=DNS:reg.test,IP:10.0.0.1"];

/// Makes certificates by name in a directory.
struct Forge(TempDir);

impl Forge {
    /// `None` where openssl is missing.
    fn open() -> Option<Forge> {
        let is_available = require(&[Package::Openssl]).is_available();
        is_available.then(|| Forge(tempfile::tempdir().unwrap()))
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn make(&self, name: &str, issuer: &str, request: CertificateRequest<'_>) -> String {
        let (certificate, key) = (self.path(&format!("{issuer}.crt")), self.path(&format!("{issuer}.key")));
        let issuer = (!issuer.is_empty()).then_some((&*certificate, &*key));
        let subject = if request.subject.is_empty() { name } else { request.subject };
        let made = CertificateRequest { issuer, subject, ..request }.make(self.0.path(), name).unwrap().0;
        fs_err::read_to_string(made).unwrap()
    }

    fn key(&self, name: &str) -> String {
        fs_err::read_to_string(self.path(&format!("{name}.key"))).unwrap()
    }
}

fn with<'a>(extensions: &'a [&'a str]) -> CertificateRequest<'a> {
    CertificateRequest { extensions, days: 30, ..CertificateRequest::default() }
}

/// A server's certificate, and a client that connects to it.
struct Case {
    name: &'static str,
    /// Content of the file that `ca` names.
    trusted: String,
    /// What the server sends: its certificate, and those of its issuers.
    sent: String,
    asked: &'static str,
    /// Days between the making of the certificates and the connection.
    after: u64,
    /// The verdict of Go's `x509.Certificate.Verify`: empty if it accepts, else a part of its error.
    go: &'static str,
    /// The same of larder.
    larder: &'static str,
}

fn cases(forge: &Forge) -> Vec<Case> {
    let mut cases = Vec::new();
    let mut case = |name, trusted: &String, sent: &String, asked, after, go, larder| {
        cases.push(Case { name, trusted: trusted.clone(), sent: sent.clone(), asked, after, go, larder });
    };
    let unknown = "certificate signed by unknown authority";
    let ca = forge.make("ca", "", with(CA));
    let leaf = forge.make("leaf", "ca", with(SERVER));
    case("leaf under a private CA", &ca, &leaf, "reg.test", 0, "", "");
    case("nothing trusted", &String::new(), &leaf, "reg.test", 0, unknown, "issued by CN=ca,");
    case("leaf itself trusted", &leaf, &leaf, "reg.test", 0, "", "");
    case("wrong name", &ca, &leaf, "mirror.test", 0, "not mirror.test", "not for mirror.test");
    case("expired", &ca, &leaf, "reg.test", 60, "has expired", "certificate expired at 20");
    let other = forge.make("other", "", with(CA));
    case("another CA trusted", &other, &leaf, "reg.test", 0, unknown, "issued by CN=ca,");
    let namesake = forge.make("namesake", "", CertificateRequest { subject: "ca", ..with(CA) });
    case(
        "another CA of the same name trusted",
        &namesake,
        &leaf,
        "reg.test",
        0,
        unknown,
        "key of the trusted CA CN=ca",
    );
    let both = format!("{other}{ca}");
    case("two CAs trusted", &both, &leaf, "reg.test", 0, "", "");

    let own = forge.make("own", "", with(SELF_SIGNED));
    case("self-signed CA, trusted", &own, &own, "reg.test", 0, "", "");
    case("self-signed CA, address", &own, &own, "10.0.0.1", 0, "", "");
    case(
        "self-signed CA, another address",
        &own,
        &own,
        "10.0.0.2",
        0,
        "not 10.0.0.2",
        "reg.test, 10.0.0.1, not",
    );
    case("self-signed CA, not trusted", &ca, &own, "reg.test", 0, unknown, "self-signed");
    case("self-signed CA, expired", &own, &own, "reg.test", 60, "has expired", "certificate expired at 20");
    let own = forge.make("own-leaf", "", with(SERVER));
    case("self-signed leaf, trusted", &own, &own, "reg.test", 0, "", "");
    case("self-signed leaf, not trusted", &ca, &own, "reg.test", 0, unknown, "self-signed");
    let own = forge.make("own-plain", "", with(&["subjectAltName=DNS:reg.test"]));
    case("self-signed without constraints, trusted", &own, &own, "reg.test", 0, "", "");
    let own =
        forge.make("own-client", "", with(&["subjectAltName=DNS:reg.test", "extendedKeyUsage=clientAuth"]));
    case(
        "self-signed for clients, trusted",
        &own,
        &own,
        "reg.test",
        0,
        "incompatible key usage",
        "for servers",
    );

    let server_ca = forge.make("server-ca", "ca", with(SELF_SIGNED));
    case("CA:TRUE under a private CA", &ca, &server_ca, "reg.test", 0, "", "");
    case("CA:TRUE under another CA", &other, &server_ca, "reg.test", 0, unknown, "issued by CN=ca,");
    case("CA:TRUE, wrong name", &ca, &server_ca, "mirror.test", 0, "not mirror.test", "not for mirror.test");
    let forged = forge.make("forged", "namesake", with(SELF_SIGNED));
    case(
        "CA:TRUE under a CA of the same name",
        &ca,
        &forged,
        "reg.test",
        0,
        unknown,
        "key of the trusted CA CN=ca",
    );
    let constrained: &[&str] =
        &["basicConstraints=critical,CA:TRUE,pathlen:0", "subjectAltName=DNS:reg.test"];
    let server_ca = forge.make("server-ca-0", "ca", with(constrained));
    case("CA:TRUE, pathlen:0 under a private CA", &ca, &server_ca, "reg.test", 0, "", "");

    let middle = forge.make("middle", "ca", with(CA));
    let end = forge.make("end", "middle", with(SERVER));
    let chain = format!("{end}{middle}");
    case("with an intermediate", &ca, &chain, "reg.test", 0, "", "");
    case("without its intermediate", &ca, &end, "reg.test", 0, unknown, "issued by CN=middle,");
    case("the intermediate trusted", &middle, &end, "reg.test", 0, "", "");
    let end_ca = forge.make("end-ca", "middle", with(SELF_SIGNED));
    case("CA:TRUE with an intermediate", &ca, &format!("{end_ca}{middle}"), "reg.test", 0, "", "");
    let below = forge.make("below", "leaf", with(SERVER));
    case("issued by a leaf", &ca, &format!("{below}{leaf}"), "reg.test", 0, unknown, "CN=leaf, whose");
    case("issued by a trusted leaf", &leaf, &below, "reg.test", 0, unknown, "CN=leaf, whose");
    let old = forge.make("old", "", CertificateRequest { days: 5, ..with(CA) });
    let leaf = forge.make("of-old", "old", with(SERVER));
    case("under an expired CA", &old, &leaf, "reg.test", 10, "has expired", "CN=old expired at 20");
    let plain = forge.make("plain", "", with(&["subjectAltName=DNS:plain"]));
    let leaf = forge.make("of-plain", "plain", with(SERVER));
    case("under a certificate without constraints", &plain, &leaf, "reg.test", 0, unknown, "none of a CA");
    let first = forge.make("first", "", with(&[]));
    let leaf = forge.make("of-first", "first", with(SERVER));
    case("under a CA of version 1", &first, &leaf, "reg.test", 0, "", "");
    case(
        "version 1, trusted",
        &first,
        &first,
        "reg.test",
        0,
        "not valid for any",
        "no subject alternative name",
    );
    let unsigning = forge.make("unsigning", "", with(&[CA[0], "keyUsage=critical,digitalSignature"]));
    let leaf = forge.make("of-unsigning", "unsigning", with(SERVER));
    case("under a CA that may not sign", &unsigning, &leaf, "reg.test", 0, unknown, "none of a CA");
    let unsigning = forge.make("unsigning-2", "ca", with(&[CA[0], "keyUsage=critical,digitalSignature"]));
    let leaf = forge.make("of-unsigning-2", "unsigning-2", with(SERVER));
    case(
        "intermediate that may not sign",
        &ca,
        &format!("{leaf}{unsigning}"),
        "reg.test",
        0,
        unknown,
        "none of a CA",
    );
    let short = forge.make("short", "", with(&["basicConstraints=critical,CA:TRUE,pathlen:0"]));
    let middle = forge.make("of-short", "short", with(CA));
    let leaf = forge.make("end-of-short", "of-short", with(SERVER));
    case(
        "longer than the CA permits",
        &short,
        &format!("{leaf}{middle}"),
        "reg.test",
        0,
        "too many intermediates",
        "none of a CA",
    );
    let leaf = forge.make("of-short-2", "short", with(SERVER));
    case("as long as the CA permits", &short, &leaf, "reg.test", 0, "", "");

    let address = forge.make("address", "ca", with(&["subjectAltName=IP:10.0.0.1,IP:fd00::1"]));
    case("address", &ca, &address, "10.0.0.1", 0, "", "");
    case("IPv6 address", &ca, &address, "fd00::1", 0, "", "");
    case("another address", &ca, &address, "10.0.0.2", 0, "not 10.0.0.2", "is for 10.0.0.1, fd00::1");
    case(
        "a name, for addresses",
        &ca,
        &address,
        "reg.test",
        0,
        "not valid for any names",
        "not for reg.test",
    );
    let text = forge.make("text", "ca", with(&["subjectAltName=DNS:10.0.0.1"]));
    case("address as a name", &ca, &text, "10.0.0.1", 0, "any IP SANs", "not for 10.0.0.1");
    let named = forge.make("named", "ca", CertificateRequest { subject: "reg.test", ..with(&[SERVER[0]]) });
    case("common name only", &ca, &named, "reg.test", 0, "legacy Common Name", "no subject alternative");
    let mail = forge.make("mail", "ca", with(&["subjectAltName=email:a@reg.test"]));
    case(
        "other names only",
        &ca,
        &mail,
        "reg.test",
        0,
        "not valid for any names",
        "is for no server, not for reg.test",
    );
    let wildcard = forge.make("wildcard", "ca", with(&["subjectAltName=DNS:*.reg.test"]));
    case("wildcard", &ca, &wildcard, "a.reg.test", 0, "", "");
    case(
        "wildcard, two labels",
        &ca,
        &wildcard,
        "a.b.reg.test",
        0,
        "not a.b.reg.test",
        "not for a.b.reg.test",
    );
    case("wildcard, no label", &ca, &wildcard, "reg.test", 0, "not reg.test", "is for *.reg.test");

    let client = forge.make("client", "ca", with(&[SERVER[1], "extendedKeyUsage=clientAuth"]));
    case("for clients", &ca, &client, "reg.test", 0, "incompatible key usage", "for servers");
    let any = forge.make("any", "ca", with(&[SERVER[1], "extendedKeyUsage=anyExtendedKeyUsage"]));
    case("for any use", &ca, &any, "reg.test", 0, "", "");
    let client_ca = forge.make("client-ca", "", with(&[CA[0], "extendedKeyUsage=clientAuth"]));
    let leaf = forge.make("of-client-ca", "client-ca", with(SERVER));
    case("under a CA for clients", &client_ca, &leaf, "reg.test", 0, "incompatible key usage", "for servers");
    let limited =
        forge.make("limited", "", with(&[CA[0], "nameConstraints=critical,permitted;DNS:shop.test"]));
    let leaf = forge.make("of-limited", "limited", with(SERVER));
    case("beyond the names of its CA", &limited, &leaf, "reg.test", 0, "for this name", "(name constraints)");
    let leaf = forge.make("of-limited-2", "limited", with(&["subjectAltName=DNS:a.shop.test"]));
    case("within the names of its CA", &limited, &leaf, "a.shop.test", 0, "", "");
    let critical = forge.make("critical", "ca", with(&[SERVER[1], "1.2.3.4=critical,ASN1:NULL"]));
    case(
        "unknown critical extension",
        &ca,
        &critical,
        "reg.test",
        0,
        "critical extension",
        "critical extension",
    );
    case(
        "unknown critical extension, trusted",
        &critical,
        &critical,
        "reg.test",
        0,
        "critical extension",
        "critical extension",
    );

    for (name, key, digest, go, larder) in [
        ("RSA 2048", "rsa:2048", "", "", ""),
        ("RSA 4096", "rsa:4096", "", "", ""),
        ("P-384", "secp384r1", "sha384", "", ""),
        ("Ed25519", "ed25519", "", "", ""),
        ("SHA-1", "rsa:2048", "sha1", unknown, "algorithm or a key that is not supported"),
        // ring has neither. Of the keys of servers, only the handshake requires that they are supported.
        ("RSA 1024", "rsa:1024", "", "", "RSA key below 2048 bits"),
        ("P-521", "secp521r1", "sha512", "", "algorithm or a key that is not supported"),
    ] {
        let id = name.replace(' ', "-");
        let ca = forge.make(&format!("{id}-ca"), "", CertificateRequest { key, digest, ..with(CA) });
        let request = CertificateRequest { key, digest, ..with(SERVER) };
        let leaf = forge.make(&id, &format!("{id}-ca"), request);
        case(name, &ca, &leaf, "reg.test", 0, go, larder);
        let own =
            forge.make(&format!("{id}-own"), "", CertificateRequest { key, digest, ..with(SELF_SIGNED) });
        case(name, &own, &own, "reg.test", 0, "", "");
    }
    cases
}

/// The column `go` has the verdicts of Go 1.27.3, whose `crypto/x509` is that of containerd, docker and podman;
/// containerd 2.4 gave the same for a pull over each certificate. A row in which larder differs is one of a key that
/// ring does not have.
#[test]
fn certificates_are_accepted_as_go_accepts_them() {
    let Some(forge) = Forge::open() else { return };
    let mut wrong = Vec::new();
    for case in cases(&forge) {
        let trusted = certificates(case.trusted.as_bytes()).unwrap_or_default();
        let sent = certificates(case.sent.as_bytes()).unwrap();
        let name = ServerName::try_from(case.asked).unwrap();
        let now = SystemTime::now() + Duration::from_secs(case.after * 86_400 + 5);
        let now = UnixTime::since_unix_epoch(now.duration_since(SystemTime::UNIX_EPOCH).unwrap());
        let verdict = GoVerifier::new(trusted, provider()).verify(&sent[0], &sent[1..], &name, now);
        let text = verdict.err().map(|problem| problem.to_string()).unwrap_or_default();
        if case.larder.is_empty() != text.is_empty() || !text.contains(case.larder) {
            wrong.push(format!("{}: {text:?}, not {:?}", case.name, case.larder));
        }
        let is_of_ring = ["RSA 1024", "P-521"].contains(&case.name);
        assert!(is_of_ring || case.go.is_empty() == case.larder.is_empty(), "{}", case.name);
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// Go's `CertPool.AppendCertsFromPEM` accepts the same files: it reads what it can, and fails if that is nothing.
#[test]
fn a_file_of_certificates_is_read_as_go_reads_it() {
    let Some(forge) = Forge::open() else { return };
    let ca = forge.make("ca", "", with(CA));
    let key = forge.key("ca");
    let der = CertificateDer::from_pem_slice(ca.as_bytes()).unwrap();
    let damaged = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
    for (content, expected) in [
        (ca.clone().into_bytes(), Ok(1)),
        (format!("{key}{ca}text\n{ca}").into_bytes(), Ok(2)),
        (format!("{damaged}{ca}").into_bytes(), Ok(1)),
        (Vec::new(), Err(TlsSettingsError::Empty)),
        (b" \n".to_vec(), Err(TlsSettingsError::Empty)),
        (key.clone().into_bytes(), Err(TlsSettingsError::OnlyKey)),
        (der.to_vec(), Err(TlsSettingsError::Der)),
        (damaged.into(), Err(TlsSettingsError::Damaged)),
        (b"ca.crt".to_vec(), Err(TlsSettingsError::NoCertificate)),
        (ca.as_bytes()[..200].to_vec(), Err(TlsSettingsError::Damaged)),
    ] {
        let read = certificates(&content).map(|certificates| certificates.len());
        assert_eq!(read, expected, "{}", String::from_utf8_lossy(&content));
    }
    forge.make("other", "", with(CA));
    for (key, expected) in [
        (forge.key("ca"), None),
        (forge.key("other"), Some(TlsSettingsError::OtherKey)),
        (String::new(), Some(TlsSettingsError::Empty)),
        (ca.clone(), Some(TlsSettingsError::NoKey)),
        (key.replace("PRIVATE", "ENCRYPTED PRIVATE"), Some(TlsSettingsError::EncryptedKey)),
    ] {
        let pem = ClientPem { certificate: ca.clone().into_bytes(), key: key.into_bytes() };
        assert_eq!(identity(&pem).err().map(TlsSettingsError::from), expected);
    }
}
