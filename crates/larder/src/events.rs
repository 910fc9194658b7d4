//! What happened to an image, in kubelet's words: type, reason and message are what `kubectl get events` shows.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Mutex, PoisonError};
use std::time::SystemTime;

use crate::pod::ObjectRef;

/// Whether an event tells of trouble.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum EventType {
    /// All is well.
    Normal,
    /// Something failed.
    Warning,
}

impl fmt::Display for EventType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            EventType::Normal => "Normal",
            EventType::Warning => "Warning",
        })
    }
}

/// Why an event was sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Reason {
    /// A pull is wanted; it may still have to wait for its turn.
    Pulling,
    /// The image is present, freshly pulled or not.
    Pulled,
    /// A pull failed.
    Failed,
    /// No pull is tried, because the last one failed not long ago.
    BackOff,
    /// The runtime could not say whether the image is present, or the name is bad.
    InspectFailed,
    /// The image is not present and must not be pulled.
    ErrImageNeverPull,
    /// Collection removed what it could, and that was not enough.
    FreeDiskSpaceFailed,
    /// The image file system reports no size.
    InvalidDiskCapacity,
    /// An image has no id, and is left alone.
    InvalidImageId,
    /// Collection failed at least twice in a row.
    ImageGcFailed,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Reason::Pulling => "Pulling",
            Reason::Pulled => "Pulled",
            Reason::Failed => "Failed",
            Reason::BackOff => "BackOff",
            Reason::InspectFailed => "InspectFailed",
            Reason::ErrImageNeverPull => "ErrImageNeverPull",
            Reason::FreeDiskSpaceFailed => "FreeDiskSpaceFailed",
            Reason::InvalidDiskCapacity => "InvalidDiskCapacity",
            Reason::InvalidImageId => "InvalidImageID",
            Reason::ImageGcFailed => "ImageGCFailed",
        })
    }
}

/// One event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event {
    /// When it happened, by the wall clock.
    pub time: SystemTime,
    /// Normal or Warning.
    pub event_type: EventType,
    /// Why it was sent.
    pub reason: Reason,
    /// What it is about.
    pub object: ObjectRef,
    /// Kubelet's text.
    pub message: String,
}

/// Takes events. Called in the middle of things: it must be quick and must not fail.
pub trait EventSink: Send + Sync {
    /// Takes one event.
    fn record(&self, event: Event);
}

/// Writes events to the log, at `info` or `warn`.
#[derive(Debug, Clone, Copy, Default)]
pub struct LogSink;

impl EventSink for LogSink {
    fn record(&self, event: Event) {
        let Event { event_type, reason, object, message, .. } = event;
        let (namespace, name, field_path) = (object.namespace, object.name, object.field_path);
        match event_type {
            EventType::Normal => tracing::info!(%reason, namespace, name, field_path, "{message}"),
            EventType::Warning => tracing::warn!(%reason, namespace, name, field_path, "{message}"),
        }
    }
}

/// Keeps the latest events in memory.
#[derive(Debug)]
pub struct RingSink {
    capacity: usize,
    events: Mutex<VecDeque<Event>>,
}

impl RingSink {
    /// Keeps at most `capacity` events; the oldest go first.
    pub fn new(capacity: usize) -> Self {
        RingSink { capacity, events: Mutex::new(VecDeque::new()) }
    }

    /// The events kept, oldest first.
    pub fn snapshot(&self) -> Vec<Event> {
        self.events.lock().unwrap_or_else(PoisonError::into_inner).iter().cloned().collect()
    }
}

impl EventSink for RingSink {
    fn record(&self, event: Event) {
        let mut events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        if self.capacity == 0 {
            return;
        }
        if events.len() == self.capacity {
            events.pop_front();
        }
        events.push_back(event);
    }
}
