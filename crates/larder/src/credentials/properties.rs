//! Properties of every keyring and every docker config, checked on generated ones.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::hash::hashed_text;
use super::matching::{is_default_registry, url_match};
use super::*;

fn host() -> impl Strategy<Value = String> {
    "[a-c]{1,2}(\\.[a-c]{1,2}){0,2}(:[0-9]{1,2})?"
}

fn location() -> impl Strategy<Value = String> {
    "(https?://)?[a-c*]{1,2}(\\.[a-c*]{1,2}){0,2}(:[0-9])?(/(v1/|v2/)?[ab/]{0,4})?"
}

fn entry() -> impl Strategy<Value = DockerConfigEntry> {
    // A colon in the user would end it early when the entry is read back.
    ("[^:]{0,8}", any::<String>(), "\\PC{0,8}", "[a-z<&]{0,4}", "[a-z\\n]{0,4}").prop_map(
        |(username, password, email, identity_token, registry_token)| DockerConfigEntry {
            username,
            password: Secret::new(password),
            email,
            identity_token: Secret::new(identity_token),
            registry_token: Secret::new(registry_token),
        },
    )
}

proptest! {
    #[test]
    fn matching_never_panics(pattern in any::<String>(), target in any::<String>()) {
        let _ = url_match(&pattern, &target);
        let _ = is_default_registry(&target);
        let mut keyring = Keyring::default();
        keyring.add(&DockerConfig::with_entry(pattern, DockerConfigEntry::default()), None, &CredentialLocation::default());
        keyring.lookup(&target);
    }

    #[test]
    fn odd_urls_never_panic(pattern in "[a.%:@#?/*\\[\\]0-9]{0,24}", target in "[a.:/0\\[\\]%]{0,24}") {
        let _ = url_match(&pattern, &target);
        let mut keyring = Keyring::default();
        keyring.add(&DockerConfig::with_entry(pattern, DockerConfigEntry::default()), None, &CredentialLocation::default());
        keyring.lookup(&target);
    }

    #[test]
    fn a_host_without_globs_matches_itself_only(one in host(), other in host()) {
        prop_assert_eq!(url_match(&one, &one), Ok(true));
        prop_assert_eq!(url_match(&one, &other), Ok(one == other));
    }

    #[test]
    fn a_star_equals_any_label(labels in proptest::collection::vec("[a-z0-9-]{0,8}", 1..5), at in any::<prop::sample::Index>()) {
        let target = labels.join(".");
        let mut pattern = labels;
        let at = at.index(pattern.len());
        pattern[at] = "*".into();
        prop_assert_eq!(url_match(&pattern.join("."), &target), Ok(true));
        pattern.push("*".into());
        prop_assert_eq!(url_match(&pattern.join("."), &target), Ok(false));
    }

    #[test]
    fn lookup_descends_through_the_keys_that_match(
        locations in proptest::collection::btree_set(location(), 0..12),
        target in "[a-c]{1,2}(\\.[a-c]{1,2}){0,2}(:[0-9])?/[ab/]{1,6}",
    ) {
        // The user of each entry is its key, so that the answer shows its keys.
        let mut keyring = Keyring::default();
        for location in &locations {
            let Ok(key) = matching::key_of(location) else { continue };
            keyring.add(&DockerConfig::with_entry(location, DockerConfigEntry { username: key, ..DockerConfigEntry::default() }), None, &CredentialLocation::default());
        }
        let keys: Vec<_> = keyring.keys().collect();
        prop_assert!(keys.windows(2).all(|pair| pair[0] > pair[1]));
        let found: Vec<_> = keyring.lookup(&target).into_iter().map(|credential| credential.username).collect();
        prop_assert!(found.windows(2).all(|pair| pair[0] >= pair[1]));
        for key in keys {
            prop_assert_eq!(found.iter().any(|user| user == key), url_match(key, &target) == Ok(true), "{}", key);
        }
    }

    #[test]
    fn no_bytes_panic_the_parser(bytes in any::<Vec<u8>>()) {
        let _ = parse_config_json(&bytes, TokenPolicy::Keep);
        let _ = parse_dockercfg(&bytes, TokenPolicy::Ignore);
        let _ = decode_auth(&String::from_utf8_lossy(&bytes));
    }

    #[test]
    fn no_damage_to_a_config_panics_the_parser(entry in entry(), at in any::<prop::sample::Index>(), byte in any::<u8>()) {
        let mut text = format!("{{\"auths\":{{\"r.example\":{}}}}}", encode_entry(&entry).reveal()).into_bytes();
        let at = at.index(text.len());
        text[at] = byte;
        let _ = parse_config_json(&text, TokenPolicy::Keep);
        let _ = parse_config_json(&text[..at], TokenPolicy::Keep).expect_err("cut off");
    }

    #[test]
    fn whatever_serde_writes_is_accepted(texts in proptest::collection::btree_map(any::<String>(), any::<String>(), 0..4)) {
        let entries: BTreeMap<_, _> = texts.iter().map(|(name, user)| (name, BTreeMap::from([("username", user)]))).collect();
        let text = serde_json::to_vec(&entries).expect("plain texts");
        let config = parse_dockercfg(&text, TokenPolicy::Keep).expect("sound JSON");
        let read: BTreeMap<_, _> = config.entries.into_iter().map(|(name, entry)| (name, entry.username)).collect();
        prop_assert_eq!(read, texts);
    }

    #[test]
    fn an_entry_is_read_as_it_was_written(entry in entry()) {
        let text = format!("{{\"r.example\":{}}}", encode_entry(&entry).reveal());
        let config = parse_dockercfg(text.as_bytes(), TokenPolicy::Keep).expect("written by larder");
        prop_assert_eq!(&config.entries["r.example"], &entry);
        prop_assert!(serde_json::from_str::<serde_json::Value>(hashed_text(&entry).reveal()).is_ok());
    }
}
