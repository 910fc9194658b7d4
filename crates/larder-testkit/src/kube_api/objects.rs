//! The objects of the API server and the history of their changes, without any HTTP.

use std::collections::{BTreeMap, VecDeque};

use serde_json::{Map, Value, json};

use super::resources::Resource;
use super::response::ApiError;
use super::selectors::Selectors;

/// How many changes are remembered before watches from older versions get 410.
const HISTORY: usize = 10_000;

/// Which object: resource, namespace (empty at cluster scope) and name.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct ObjectKey {
    pub(super) resource: Resource,
    pub(super) namespace: String,
    pub(super) name: String,
}

/// One change, as a watch reports it.
#[derive(Debug, Clone)]
pub(super) struct Change {
    pub(super) version: u64,
    pub(super) key: ObjectKey,
    /// `None` if the change created it.
    pub(super) before: Option<Value>,
    /// As it was last, if the change deleted it.
    pub(super) object: Value,
    pub(super) is_deletion: bool,
}

/// All objects. The version counts the changes, as etcd's revision does.
#[derive(Debug, Default)]
pub(super) struct Objects {
    version: u64,
    current: BTreeMap<ObjectKey, Value>,
    history: VecDeque<Change>,
    /// Changes up to this version are forgotten.
    compacted: u64,
}

impl Objects {
    pub(super) fn version(&self) -> u64 {
        self.version
    }

    pub(super) fn get(&self, key: &ObjectKey) -> Result<&Value, ApiError> {
        self.current.get(key).ok_or_else(|| ApiError::not_found(&key.resource, &key.name))
    }

    pub(super) fn has_namespace(&self, name: &str) -> bool {
        self.current.keys().any(|key| key.resource.kind == "Namespace" && key.name == name)
    }

    /// The objects of a resource in a namespace, or in all of them.
    pub(super) fn list(&self, resource: &Resource, namespace: Option<&str>, of: &Selectors) -> Vec<Value> {
        let matches = |key: &ObjectKey, object: &Value| {
            key.resource == *resource
                && namespace.is_none_or(|ns| key.namespace == ns)
                && of.match_object(object)
        };
        self.current
            .iter()
            .filter(|(key, object)| matches(key, object))
            .map(|(_, object)| object.clone())
            .collect()
    }

    /// The changes after a version, oldest first; 410 if they are no longer known.
    pub(super) fn changes_after(&self, version: u64) -> Result<impl Iterator<Item = &Change>, ApiError> {
        if version < self.compacted {
            return Err(ApiError::expired(version, self.version));
        }
        Ok(self.history.iter().filter(move |change| change.version > version))
    }

    /// Forgets the history, as etcd's compaction does.
    pub(super) fn compact(&mut self) {
        self.compacted = self.version;
        self.history.clear();
    }

    pub(super) fn create(
        &mut self,
        key: &ObjectKey,
        mut object: Value,
        now: &str,
    ) -> Result<Value, ApiError> {
        if self.current.contains_key(key) {
            return Err(ApiError::already_exists(&key.resource, &key.name));
        }
        let uid = format!("00000000-0000-4000-8000-{:012x}", self.version + 1);
        let metadata = metadata_of(&mut object);
        metadata.insert("name".into(), json!(key.name));
        if !key.namespace.is_empty() {
            metadata.insert("namespace".into(), json!(key.namespace));
        }
        metadata.entry("uid").or_insert(json!(uid));
        metadata.insert("creationTimestamp".into(), json!(now));
        metadata.insert("generation".into(), json!(1));
        Ok(self.store(key, object))
    }

    /// Replaces an object, or only its status. A resource version in the new one must be the present one.
    pub(super) fn update(
        &mut self,
        key: &ObjectKey,
        mut new: Value,
        part: ObjectPart,
    ) -> Result<Value, ApiError> {
        let old = self.get(key)?.clone();
        let given = new["metadata"]["resourceVersion"].as_str().unwrap_or_default();
        if !given.is_empty() && Some(given) != old["metadata"]["resourceVersion"].as_str() {
            return Err(ApiError::conflict(&key.resource, &key.name));
        }
        if part == ObjectPart::Status {
            let status = new["status"].take();
            new = old.clone();
            new["status"] = status;
        } else if key.resource.has_status {
            new["status"] = old["status"].clone();
        }
        let changes_spec = old["spec"] != new["spec"];
        let metadata = metadata_of(&mut new);
        for field in ["uid", "creationTimestamp", "name", "namespace"] {
            if let Some(value) = old["metadata"].get(field) {
                metadata.insert(field.into(), value.clone());
            }
        }
        let generation = old["metadata"]["generation"].as_u64().unwrap_or(1);
        metadata.insert("generation".into(), json!(generation + u64::from(changes_spec)));
        metadata.insert("resourceVersion".into(), old["metadata"]["resourceVersion"].clone());
        drop_nulls(&mut new);
        // A write that changes nothing is no change.
        if new == old { Ok(old) } else { Ok(self.store(key, new)) }
    }

    pub(super) fn delete(&mut self, key: &ObjectKey) -> Result<Value, ApiError> {
        let before = self.get(key)?.clone();
        self.current.remove(key);
        let mut object = before.clone();
        let version = self.next_version(&mut object);
        self.remember(Change {
            version,
            key: key.clone(),
            before: Some(before),
            object: object.clone(),
            is_deletion: true,
        });
        Ok(object)
    }

    fn store(&mut self, key: &ObjectKey, mut object: Value) -> Value {
        let version = self.next_version(&mut object);
        let before = self.current.insert(key.clone(), object.clone());
        self.remember(Change {
            version,
            key: key.clone(),
            before,
            object: object.clone(),
            is_deletion: false,
        });
        object
    }

    fn next_version(&mut self, object: &mut Value) -> u64 {
        self.version += 1;
        metadata_of(object).insert("resourceVersion".into(), json!(self.version.to_string()));
        self.version
    }

    fn remember(&mut self, change: Change) {
        self.history.push_back(change);
        if self.history.len() > HISTORY
            && let Some(oldest) = self.history.pop_front()
        {
            self.compacted = oldest.version;
        }
    }
}

/// Part of an object that a write replaces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ObjectPart {
    /// All but the status, where the resource has a status of its own.
    Object,
    /// The status alone.
    Status,
}

/// A JSON merge patch (RFC 7386).
pub(super) fn merge(target: &mut Value, patch: &Value) {
    let Value::Object(patch) = patch else {
        target.clone_from(patch);
        return;
    };
    if !target.is_object() {
        *target = json!({});
    }
    for (field, value) in patch {
        if value.is_null() {
            target.as_object_mut().map(|target| target.remove(field));
        } else {
            merge(&mut target[field], value);
        }
    }
}

fn metadata_of(object: &mut Value) -> &mut Map<String, Value> {
    if !object["metadata"].is_object() {
        object["metadata"] = json!({});
    }
    object["metadata"].as_object_mut().expect("it was made one")
}

/// Indexing makes fields that are `null`; an API server has none.
fn drop_nulls(object: &mut Value) {
    if let Some(object) = object.as_object_mut() {
        object.retain(|_, value| !value.is_null());
    }
}
