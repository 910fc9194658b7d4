//! Memory that contained a password is overwritten: after use, this process's memory is searched for it.

#![allow(clippy::unwrap_used, reason = "a panic is how a test says no")]

use std::collections::BTreeMap;
use std::io::{Read as _, Seek as _, SeekFrom};
use std::sync::{Mutex, PoisonError};

use larder::credentials::plugin::CredentialProviderResponse;
use larder::credentials::{
    DockerConfig, DockerConfigEntry, DockerConfigFormat, PullSecret, Secret, SecretCoordinates, TokenPolicy,
    decode_auth, encode_auth, encode_entry, parse_config_json, read_config_file,
};
use zeroize::Zeroizing;

/// Held by the test that runs: each one searches the memory of the whole process for the same password.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// No text of this program holds the password, so that only what was made at run time is found.
fn password() -> Zeroizing<String> {
    let mut password = Zeroizing::new(String::with_capacity(96));
    password.extend((0..96_u32).filter_map(|n| char::from_digit(10 + n * 7 % 26, 36)));
    password
}

/// How often the middle of the password, plain or in base64, is in writable memory.
fn copies() -> usize {
    let maps = fs_err::read_to_string("/proc/self/maps").unwrap();
    let mut memory = fs_err::File::open("/proc/self/mem").unwrap();
    let password = password();
    let auth = encode_auth("bob", &Secret::new(&**password));
    // Each needle is kept with its bits turned, and so is not found itself.
    let turned = |text: &str| text.bytes().skip(40).take(40).map(|byte| !byte).collect::<Vec<_>>();
    let needles = [turned(&password), turned(auth.reveal())];
    drop((password, auth));
    let mut found = 0;
    let mut piece = Zeroizing::new(vec![0_u8; 1 << 20]);
    for line in maps.lines().filter(|line| line.contains(" rw") && !line.contains("[v")) {
        let (from, to) = line.split_once(' ').unwrap().0.split_once('-').unwrap();
        let [mut at, to] = [from, to].map(|text| u64::from_str_radix(text, 16).unwrap());
        while at < to {
            piece.fill(0);
            memory.seek(SeekFrom::Start(at)).unwrap();
            let wanted = usize::try_from(to - at).unwrap().min(piece.len());
            let Ok(read) = memory.read(&mut piece[..wanted]) else { break };
            for needle in &needles {
                let is_here =
                    |window: &[u8]| window.iter().zip(needle).all(|(byte, turned)| *byte == !turned);
                found += piece[..read].windows(needle.len()).filter(|window| is_here(window)).count();
            }
            at += read.max(1) as u64;
        }
    }
    found
}

/// A docker config with the password in each form, with escapes so that nothing can be borrowed from it.
fn document(end: &str) -> Zeroizing<Vec<u8>> {
    let mut text = Zeroizing::new(Vec::with_capacity(4096));
    let password = password();
    let auth = encode_auth("bob", &Secret::new(&**password));
    for piece in [
        r#"{"HttpHeaders": {"a": "\/"#,
        &password,
        r#""}, "other": {"x": "\/"#,
        &password,
        r#""}, "auths": {"one.example": {"password": "first\/"#,
        &password,
        r#"", "password": "\/"#,
        &password,
        r#""}, "two.example": {"identitytoken": "\/"#,
        &password,
        r#"", "auth": "\r\n"#,
        auth.reveal(),
        end,
    ] {
        text.extend_from_slice(piece.as_bytes());
    }
    text
}

/// In a build without optimization, vector registers with pieces of an input are spilled to the stack. That is not what
/// is looked for.
#[inline(never)]
fn overwrite_stack() {
    fn deeper(left: u32) {
        std::hint::black_box([0_u8; 1 << 10]);
        if left > 0 {
            deeper(left - 1);
        }
    }
    deeper(64);
}

#[track_caller]
fn assert_wiped(what: &str, used: impl FnOnce()) {
    used();
    overwrite_stack();
    assert_eq!(copies(), 0, "{what}");
}

const SOUND: &str = r#""}}}"#;
const BROKEN: [&str; 3] = [r#"!"}}}"#, r#""}}"#, ""];

#[test]
fn passwords_are_erased_from_memory() {
    let _turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let kept = password();
    assert!(copies() > 0, "the search finds what is there");
    drop(kept);
    assert_wiped("nothing was done yet", || ());

    assert_wiped("a docker config", || {
        assert_eq!(parse_config_json(&document(SOUND), TokenPolicy::Keep).unwrap().entries.len(), 2);
    });
    for end in BROKEN {
        assert_wiped(end, || {
            parse_config_json(&document(end), TokenPolicy::Keep).unwrap_err();
        });
    }
    assert_wiped("a config file", || {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("config.json");
        fs_err::write(&path, document(SOUND)).unwrap();
        read_config_file(&path, DockerConfigFormat::ConfigJson, TokenPolicy::Keep).unwrap();
    });
    assert_wiped("a pull secret", || {
        let data = BTreeMap::from([(".dockerconfigjson".to_owned(), std::mem::take(&mut *document(SOUND)))]);
        let kind = "kubernetes.io/dockerconfigjson".to_owned();
        let secret = PullSecret { kind, data, coordinates: SecretCoordinates::default() };
        secret.docker_config(TokenPolicy::Keep).unwrap().unwrap();
        drop(secret.clone());
    });
    assert_wiped("an entry that is written", || {
        let config: DockerConfig = parse_config_json(&document(SOUND), TokenPolicy::Keep).unwrap();
        config.entries.values().for_each(|entry: &DockerConfigEntry| drop(encode_entry(entry)));
    });
    assert_wiped("a broken auth", || {
        let password = password();
        let mut auth = Zeroizing::new(String::with_capacity(256));
        auth.push_str(encode_auth("bob", &Secret::new(&**password)).reveal());
        auth.push('!');
        decode_auth(&auth).unwrap_err();
    });
}

#[test]
fn answers_of_providers_are_erased_from_memory() {
    let _turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    for end in [r#"", "more": 1}}}"#, r#""}}} x"#, r#""}}}"#] {
        assert_wiped(end, || {
            let mut answer = Zeroizing::new(Vec::with_capacity(4096));
            let version = "credentialprovider.kubelet.k8s.io/v1";
            let head = format!(
                r#"{{"kind": "CredentialProviderResponse", "apiVersion": "{version}", "auth": {{"r.example": {{"username": "u", "password": ""#
            );
            answer.extend_from_slice(head.as_bytes());
            answer.extend_from_slice(password().as_bytes());
            answer.extend_from_slice(end.as_bytes());
            assert_eq!(CredentialProviderResponse::decode(&answer, version).is_ok(), end.len() == 4);
        });
    }
}
