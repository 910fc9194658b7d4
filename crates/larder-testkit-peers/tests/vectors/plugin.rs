//! `credential_plugin.json`: providers, played by the case or by a script that is really run.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::os::unix::fs::PermissionsExt as _;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use larder::config::GoDuration;
use larder::credentials::plugin::{
    self, CredentialProviderRequest, CredentialProviderResponse, Plugin, PluginExecError, PluginExecutor,
    ProvidedCredentials, ProviderConfig, ServiceAccount, ServiceAccountClient, ServiceAccountTokenRequest,
    TokenAttributes,
};
use larder::credentials::{DockerConfig, Secret, ServiceAccountCoordinates};
use larder::internals;
use larder::pod::Pod;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::keyring::{PlainConfig, docker_config};
use crate::pull::simulated;
use crate::{CaseResult, parse};

pub(crate) fn room(op: &str, input: &Value) -> Option<CaseResult> {
    Some(match op {
        "plugin_encode_request" => parse(input).map(encode_request),
        "plugin_exec" => parse(input).map(exec),
        "plugin_sa_cache_key" => parse(input).map(account_key),
        "plugin_cache_key" => parse(input).and_then(cache_key),
        "plugin_single_flight_key" => parse(input).map(|input: SingleFlightKey| {
            let token = Secret::new(input.token);
            json!({"key_hex": hex(&internals::flight_key(&input.image, &token, &input.annotations))})
        }),
        "plugin_registry_of" => {
            parse(input).map(|input: ProviderImage| json!({"registry": internals::registry_of(&input.image)}))
        }
        "plugin_token_hash" => parse(input)
            .map(|input: TokenInput| json!({"hash": internals::token_hash(&Secret::new(input.token))})),
        "plugin_env" => parse(input).map(|input: Environment| {
            let own = input.plugin.into_iter().map(|Variable { name, value }| (name, value));
            json!({"merged": plugin::environment(input.system, own)})
        }),
        "plugin_match_images" => parse(input).map(|input: MatchImages| {
            let config = ProviderConfig { match_images: input.match_images, ..ProviderConfig::default() };
            json!({"allowed": scripted(&config, Arc::default()).matches(&input.image)})
        }),
        "plugin_provide" => parse(input).map(|input| simulated(provide(input))),
        "plugin_config_load" => parse(input).map(|input| config_load(&input)),
        "plugin_config_validate" => parse(input).and_then(|input| config_validate(&input)),
        _ => return None,
    })
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut hex, byte| {
        let _ = write!(hex, "{byte:02x}");
        hex
    })
}

fn millis(ms: i64) -> GoDuration {
    GoDuration::parse(&format!("{ms}ms")).expect("a duration")
}

fn in_millis(time: GoDuration) -> Value {
    time.to_std().map_or(Value::Null, |time| json!(time.as_millis()))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct EncodeRequest {
    api_version: String,
    image: String,
    service_account_token: String,
    service_account_annotations: BTreeMap<String, String>,
}

fn encode_request(input: EncodeRequest) -> Value {
    let request = CredentialProviderRequest {
        image: input.image,
        token: Secret::new(input.service_account_token),
        annotations: input.service_account_annotations,
    };
    json!({"text": String::from_utf8_lossy(&request.encode(&input.api_version))})
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ExecCase {
    api_version: String,
    name: String,
    image: String,
    stdout: String,
    stderr: String,
    exit_code: i32,
}

fn exec(input: ExecCase) -> Value {
    let dir = tempfile::tempdir().expect("a directory");
    let put = |name: &str, text: &str| fs_err::write(dir.path().join(name), text).expect("a file");
    put("stdout", &input.stdout);
    put("stderr", &input.stderr);
    let here = dir.path().display();
    put(
        &input.name,
        &format!("#!/bin/sh\ncat {here}/stdout\ncat {here}/stderr >&2\nexit {}\n", input.exit_code),
    );
    let mode = std::fs::Permissions::from_mode(0o755);
    fs_err::set_permissions(dir.path().join(&input.name), mode).expect("a program");
    let config =
        ProviderConfig { name: input.name, api_version: input.api_version, ..ProviderConfig::default() };
    let program = internals::provider_program(&config, dir.path());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let request = CredentialProviderRequest { image: input.image, ..CredentialProviderRequest::default() };
    match runtime.block_on(program.execute(&request)) {
        Ok(response) => json!({"response": {
            "cache_key_type": response.cache_key_type,
            "cache_duration_ms": response.cache_duration.map_or(Value::Null, in_millis),
            "auth": plain(&response.auth),
        }}),
        Err(error) => json!({"error": error.kubelet_text().reveal()}),
    }
}

/// User and password by pattern.
fn plain(config: &DockerConfig) -> Value {
    let entries = config.entries.iter().map(|(pattern, entry)| {
        (pattern.clone(), json!({"username": entry.username, "password": entry.password.reveal()}))
    });
    entries.collect::<Map<_, _>>().into()
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct AccountKeyCase {
    namespace: String,
    name: String,
    uid: String,
    annotations: BTreeMap<String, String>,
    cache_type: String,
    token: String,
}

fn account_key(input: AccountKeyCase) -> Value {
    let AccountKeyCase { namespace, name, uid, annotations, cache_type, token } = input;
    let at = ServiceAccountCoordinates { uid, namespace, name };
    let token = Secret::new(token);
    let key = internals::account_key(&at, &annotations, (cache_type == "Token").then_some(&token));
    json!({"key_hex": hex(&key)})
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct CacheKeyCase {
    base: String,
    service_account_key_hex: String,
}

fn cache_key(input: CacheKeyCase) -> CaseResult {
    let digits = input.service_account_key_hex;
    let bytes = (0..digits.len() / 2).map(|at| u8::from_str_radix(&digits[2 * at..2 * at + 2], 16));
    let account = bytes.collect::<Result<Vec<_>, _>>().map_err(|error| error.to_string())?;
    Ok(json!({"key_hex": hex(&internals::cache_key(&input.base, &account))}))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SingleFlightKey {
    image: String,
    token: String,
    annotations: BTreeMap<String, String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ProviderImage {
    image: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct TokenInput {
    token: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Environment {
    system: Vec<String>,
    plugin: Vec<Variable>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Variable {
    name: String,
    value: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct MatchImages {
    match_images: Vec<String>,
    image: String,
}

#[derive(Deserialize, Clone)]
#[serde(deny_unknown_fields)]
struct PlainAttributes {
    audience: String,
    cache_type: String,
    require_service_account: Option<bool>,
    #[serde(default)]
    required_annotation_keys: Vec<String>,
    #[serde(default)]
    optional_annotation_keys: Vec<String>,
}

impl From<PlainAttributes> for TokenAttributes {
    fn from(plain: PlainAttributes) -> Self {
        TokenAttributes {
            audience: plain.audience,
            cache_type: plain.cache_type,
            require_service_account: plain.require_service_account,
            required_annotation_keys: plain.required_annotation_keys,
            optional_annotation_keys: plain.optional_annotation_keys,
        }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ProvideCase {
    match_images: Vec<String>,
    default_cache_duration_ms: i64,
    token_attributes: Option<PlainAttributes>,
    steps: Vec<ProvideStep>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ProvideStep {
    advance_ms: u64,
    image: String,
    pod: PluginPod,
    response: Option<PlainResponse>,
    service_account: Option<PluginAccount>,
    service_account_error: Option<String>,
    #[serde(default)]
    token: String,
    token_error: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PluginPod {
    namespace: String,
    name: String,
    uid: String,
    service_account_name: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PlainResponse {
    #[serde(default)]
    cache_key_type: String,
    cache_duration_ms: Option<i64>,
    #[serde(default)]
    auth: PlainConfig,
    error: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PluginAccount {
    namespace: String,
    name: String,
    uid: String,
    annotations: BTreeMap<String, String>,
}

/// Behaviour of a provider in a step, and its calls.
#[derive(Default)]
struct ProviderScript {
    answer: Option<Result<CredentialProviderResponse, PluginExecError>>,
    account: Option<Result<ServiceAccount, String>>,
    token: Option<Result<Secret, String>>,
    executions: Vec<Value>,
    token_requests: Vec<Value>,
}

#[derive(Clone, Default)]
struct ScriptedPlugin(Arc<Mutex<ProviderScript>>);

impl ScriptedPlugin {
    fn with<T>(&self, act: impl FnOnce(&mut ProviderScript) -> T) -> T {
        act(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

#[async_trait]
impl PluginExecutor for ScriptedPlugin {
    async fn execute(
        &self,
        request: &CredentialProviderRequest,
    ) -> Result<CredentialProviderResponse, PluginExecError> {
        self.with(|script| {
            script.executions.push(json!({
                "image": request.image,
                "service_account_token": request.token.reveal(),
                "service_account_annotations": request.annotations,
            }));
            script.answer.take().expect("the step has a response")
        })
    }
}

#[async_trait]
impl ServiceAccountClient for ScriptedPlugin {
    async fn get(&self, _namespace: &str, _name: &str) -> Result<ServiceAccount, String> {
        self.with(|script| script.account.clone().expect("the step has a service account"))
    }

    async fn token(&self, request: &ServiceAccountTokenRequest) -> Result<Secret, String> {
        self.with(|script| {
            script.token_requests.push(json!({
                "namespace": request.account.namespace,
                "name": request.account.name,
                "service_account_uid": request.account.uid,
                "audiences": [request.audience],
                "bound_pod_name": request.pod_name,
                "bound_pod_uid": request.pod_uid,
            }));
            script.token.clone().expect("the step has a token")
        })
    }
}

fn scripted(config: &ProviderConfig, stage: Arc<ScriptedPlugin>) -> Plugin {
    Plugin::new(config, stage.clone(), stage)
}

async fn provide(input: ProvideCase) -> Value {
    let config = ProviderConfig {
        name: "provider".into(),
        match_images: input.match_images,
        default_cache_duration: Some(millis(input.default_cache_duration_ms)),
        api_version: "credentialprovider.kubelet.k8s.io/v1".into(),
        token_attributes: input.token_attributes.map(Into::into),
        ..ProviderConfig::default()
    };
    let stage = ScriptedPlugin::default();
    let provider = scripted(&config, Arc::new(stage.clone()));
    let mut steps = Vec::new();
    for step in input.steps {
        tokio::time::advance(Duration::from_millis(step.advance_ms)).await;
        let answer = step.response.map(|response| match response.error {
            Some(error) => Err(PluginExecError::Other(error)),
            None => Ok(CredentialProviderResponse {
                cache_key_type: response.cache_key_type,
                cache_duration: response.cache_duration_ms.map(millis),
                auth: docker_config(response.auth),
            }),
        });
        let account = step.service_account.map(|PluginAccount { namespace, name, uid, annotations }| {
            ServiceAccount { at: ServiceAccountCoordinates { uid, namespace, name }, annotations }
        });
        let account = step.service_account_error.map(Err).or(account.map(Ok));
        let token = step.token_error.map_or(Ok(Secret::new(step.token)), Err);
        stage.with(|script| {
            *script = ProviderScript { answer, account, token: Some(token), ..ProviderScript::default() };
        });
        let PluginPod { namespace, name, uid, service_account_name } = step.pod;
        let pod = Pod { namespace, name, uid, service_account: service_account_name, ..Pod::default() };
        let given = provider.provide(&step.image, &pod).await;
        let script = stage.with(std::mem::take);
        assert!(script.answer.is_none(), "the step's response was not asked for");
        let (ProvidedCredentials { auth, account }, error) = match given {
            Ok(given) => (given, Value::Null),
            Err(error) => (ProvidedCredentials::default(), error.kubelet_text().reveal().into()),
        };
        steps.push(json!({
            "credentials": plain(&auth),
            "service_account": account.map(|at| json!({"namespace": at.namespace, "name": at.name, "uid": at.uid})),
            "error": error,
            "executions": script.executions,
            "token_requests": script.token_requests,
            "stored_keys_hex": provider.cached_keys().iter().map(|key| hex(key)).collect::<Vec<_>>(),
        }));
    }
    json!({"steps": steps})
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ConfigLoad {
    files: BTreeMap<String, String>,
    directory: bool,
}

fn config_load(input: &ConfigLoad) -> Value {
    let dir = tempfile::tempdir().expect("a directory");
    for (name, text) in &input.files {
        let path = dir.path().join(name);
        fs_err::create_dir_all(path.parent().expect("a parent")).expect("a directory");
        fs_err::write(path, text).expect("a file");
    }
    let only = input.files.keys().next().filter(|_| !input.directory);
    let path = only.map_or_else(|| dir.path().to_owned(), |name| dir.path().join(name));
    let decode = |text: &str| serde_saphyr::from_str(text).map_err(|error| error.to_string());
    match plugin::load(&path, &decode) {
        Ok(loaded) => json!({
            "hash": loaded.hash,
            "providers": loaded.providers.iter().map(provider).collect::<Vec<_>>(),
        }),
        Err(error) => {
            json!({"error": error.to_string().replace(&dir.path().display().to_string(), "<DIR>")})
        }
    }
}

fn provider(config: &ProviderConfig) -> Value {
    let mut provider = json!({
        "name": config.name,
        "match_images": config.match_images,
        "default_cache_duration_ms": config.default_cache_duration.map_or(Value::Null, in_millis),
        "api_version": config.api_version,
        "args": config.args,
        "env": config.env.iter()
            .map(|(name, value)| json!({"name": name, "value": value.reveal()}))
            .collect::<Vec<_>>(),
    });
    if let Some(attributes) = &config.token_attributes {
        provider["token_attributes"] = json!({
            "audience": attributes.audience,
            "cache_type": attributes.cache_type,
            "require_service_account": attributes.require_service_account,
            "required_annotation_keys": attributes.required_annotation_keys,
            "optional_annotation_keys": attributes.optional_annotation_keys,
        });
    }
    provider
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ConfigValidate {
    providers: Vec<Value>,
    #[serde(default = "on")]
    service_account_token_gate: bool,
}

fn on() -> bool {
    true
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PlainProvider {
    name: String,
    #[serde(default)]
    match_images: Vec<String>,
    default_cache_duration_ms: Option<i64>,
    #[serde(default)]
    api_version: String,
    token_attributes: Option<PlainAttributes>,
}

fn config_validate(input: &ConfigValidate) -> CaseResult {
    let provider = |value: &Value| {
        parse::<PlainProvider>(value).map(|plain| ProviderConfig {
            name: plain.name,
            match_images: plain.match_images,
            default_cache_duration: plain.default_cache_duration_ms.map(millis),
            api_version: plain.api_version,
            token_attributes: plain.token_attributes.map(Into::into),
            ..ProviderConfig::default()
        })
    };
    let providers = input.providers.iter().map(provider).collect::<Result<Vec<_>, _>>()?;
    Ok(json!({"errors": plugin::problems(&providers, input.service_account_token_gate)}))
}
