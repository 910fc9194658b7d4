//! Validates configured providers, with kubelet's messages in kubelet's order. Pure.

use std::collections::BTreeSet;

use super::config::{ProviderConfig, TokenAttributes};
use super::wire::{V1, VERSIONS};
use crate::credentials::matching::RegistryLocation;
use crate::go_format::quote;
use crate::pod::{is_edged, is_subdomain};

/// All errors; empty if the providers are valid. `token_gate` is kubelet's
/// `KubeletServiceAccountTokenForCredentialProviders`.
pub fn problems(providers: &[ProviderConfig], token_gate: bool) -> Vec<String> {
    if providers.is_empty() {
        return vec!["providers: Required value: at least 1 item in plugins is required".to_owned()];
    }
    let (mut problems, mut names) = (Vec::new(), BTreeSet::new());
    for provider in providers {
        name_problems(provider, &mut names, &mut problems);
        match provider.api_version.as_str() {
            "" => problems.push("providers.apiVersion: Required value".to_owned()),
            version if VERSIONS.contains(&version) => {}
            version => problems.push(unsupported("providers.apiVersion", version, &VERSIONS)),
        }
        if provider.match_images.is_empty() {
            problems.push(
                "providers.matchImages: Required value: at least 1 item in matchImages is required"
                    .to_owned(),
            );
        }
        for pattern in
            provider.match_images.iter().filter(|pattern| RegistryLocation::parse(pattern).is_err())
        {
            problems.push(invalid("providers.matchImages", pattern, "match image is invalid: not a URL"));
        }
        match provider.default_cache_duration {
            None => problems.push("providers.defaultCacheDuration: Required value".to_owned()),
            Some(time) if time.is_negative() => problems.push(invalid(
                "providers.defaultCacheDuration",
                &time.to_string(),
                "must be greater than or equal to 0",
            )),
            Some(_) => {}
        }
        if let Some(attributes) = &provider.token_attributes {
            token_problems(attributes, &provider.api_version, token_gate, &mut problems);
        }
    }
    problems
}

fn name_problems<'a>(
    provider: &'a ProviderConfig,
    names: &mut BTreeSet<&'a str>,
    problems: &mut Vec<String>,
) {
    let name = provider.name.as_str();
    let mut wrong = |what| problems.push(invalid("providers.name", name, what));
    if name.contains('/') {
        wrong("provider name cannot contain '/'");
    }
    if name.contains(' ') {
        wrong("provider name cannot contain spaces");
    }
    match name {
        "." => wrong("provider name cannot be '.'"),
        ".." => wrong("provider name cannot be '..'"),
        _ => {}
    }
    if !names.insert(name) {
        problems.push(format!("providers.name: Duplicate value: {}", quote(name)));
    }
}

fn token_problems(
    attributes: &TokenAttributes,
    api_version: &str,
    token_gate: bool,
    problems: &mut Vec<String>,
) {
    let at = |field: &str| format!("providers.tokenAttributes.{field}");
    if !token_gate {
        problems.push(
            "providers.tokenAttributes: Forbidden: tokenAttributes is not supported when \
             KubeletServiceAccountTokenForCredentialProviders feature gate is disabled"
                .to_owned(),
        );
    }
    if attributes.audience.is_empty() {
        problems.push(format!("{}: Required value", at("serviceAccountTokenAudience")));
    }
    if attributes.require_service_account.is_none() {
        problems.push(format!("{}: Required value", at("requireServiceAccount")));
    }
    if api_version != V1 {
        problems.push(format!(
            "providers.tokenAttributes: Forbidden: tokenAttributes is only supported for {V1} API version"
        ));
    }
    match attributes.cache_type.as_str() {
        "ServiceAccount" | "Token" => {}
        "" => problems.push(format!(
            "{}: Required value: cacheType is required to be set when tokenAttributes is specified. \
             Supported values are: ServiceAccount, Token",
            at("cacheType")
        )),
        other => problems.push(unsupported(&at("cacheType"), other, &["ServiceAccount", "Token"])),
    }
    annotation_problems(attributes, problems);
}

fn annotation_problems(attributes: &TokenAttributes, problems: &mut Vec<String>) {
    let at = |field: &str| format!("providers.tokenAttributes.{field}");
    let (required, optional) = (&attributes.required_annotation_keys, &attributes.optional_annotation_keys);
    if attributes.require_service_account == Some(false) && !required.is_empty() {
        problems.push(format!(
            "{}: Forbidden: requireServiceAccount cannot be false when requiredServiceAccountAnnotationKeys is set",
            at("requiredServiceAccountAnnotationKeys")
        ));
    }
    key_problems(required, &at("requiredServiceAccountAnnotationKeys"), problems);
    key_problems(optional, &at("optionalServiceAccountAnnotationKeys"), problems);
    let required: BTreeSet<_> = required.iter().collect();
    let both: BTreeSet<_> = optional.iter().filter(|key| required.contains(key)).collect();
    if !both.is_empty() {
        let both: Vec<_> = both.into_iter().map(|key| quote(key)).collect();
        problems.push(format!(
            "providers.tokenAttributes: Invalid value: [{}]: annotation keys cannot be both required and optional",
            both.join(", ")
        ));
    }
}

fn key_problems(keys: &[String], field: &str, problems: &mut Vec<String>) {
    let mut known = BTreeSet::new();
    for key in keys {
        problems.extend(qualified_name_problems(key).into_iter().map(|what| invalid(field, key, what)));
        if !known.insert(key) {
            problems.push(format!("{field}: Duplicate value: {}", quote(key)));
        }
    }
}

const NAME_FORM: &str = "name part must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for validation is '([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]')";
const PREFIX_FORM: &str = "prefix part a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start and end with an alphanumeric character (e.g. 'example.com', regex used for validation is '[a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')";
const WHOLE_FORM: &str = "a qualified name must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for validation is '([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]') with an optional DNS subdomain prefix and '/' (e.g. 'example.com/MyName')";

/// Kubernetes' rules for the key of an annotation, in any case of letters.
fn qualified_name_problems(key: &str) -> Vec<&'static str> {
    let key = key.to_lowercase();
    let (prefix, name) = match key.split_once('/') {
        None => (None, key.as_str()),
        Some((_, rest)) if rest.contains('/') => return vec![WHOLE_FORM],
        Some((prefix, name)) => (Some(prefix), name),
    };
    let mut problems = Vec::new();
    match prefix {
        Some("") => problems.push("prefix part must be non-empty"),
        Some(prefix) if !is_subdomain(prefix) => problems.push(PREFIX_FORM),
        _ => {}
    }
    if name.is_empty() {
        problems.push("name part must be non-empty");
    } else if name.len() > 63 {
        problems.push("name part must be no more than 63 bytes");
    }
    let inner = |b: u8| b.is_ascii_alphanumeric() || b"-_.".contains(&b);
    if !name.bytes().all(inner) || !is_edged(name) {
        problems.push(NAME_FORM);
    }
    problems
}

fn invalid(field: &str, value: &str, what: &str) -> String {
    format!("{field}: Invalid value: {}: {what}", quote(value))
}

fn unsupported(field: &str, value: &str, known: &[&str]) -> String {
    let known: Vec<_> = known.iter().map(|known| quote(known)).collect();
    format!("{field}: Unsupported value: {}: supported values: {}", quote(value), known.join(", "))
}
