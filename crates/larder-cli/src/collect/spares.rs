//! Notes each image as soon as it is ensured: a command may wait for others for long, and a collection meanwhile, or
//! after the command was killed, has to leave it alone.

use std::mem;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::task::spawn_blocking;

use super::{EnsuredFile, Place};
use crate::failure::Failure;

/// Writes down what is ensured on a runtime. Larder's own store needs none of this while a command has it: nobody else
/// gets in.
pub(crate) struct Spares {
    file: Arc<EnsuredFile>,
    /// Ids that nobody has begun to write down.
    waiting: Mutex<Vec<String>>,
    /// Had by who writes. Each write is synced: who comes meanwhile is written down together.
    turn: tokio::sync::Mutex<()>,
}

impl Spares {
    /// For the images of this place.
    pub(crate) fn at(place: &Place) -> Spares {
        Spares {
            file: Arc::new(EnsuredFile::at(place)),
            waiting: Mutex::default(),
            turn: tokio::sync::Mutex::default(),
        }
    }

    /// Takes note of an image, by id. When it returns, a collection that looks for what is used finds it; trouble is in
    /// the log, and told when the command [ends](super::Notes::ensured) and it is still there.
    pub(crate) async fn add(&self, id: &str) {
        self.waiting().push(id.to_owned());
        let _turn = self.turn.lock().await;
        let ids = mem::take(&mut *self.waiting());
        if ids.is_empty() {
            return; // who had the turn before took it along
        }
        if let Err(failure) = self.write(ids).await {
            tracing::info!("not noted yet that images were ensured: {}", failure.message());
        }
    }

    async fn write(&self, ids: Vec<String>) -> Result<(), Failure> {
        let file = Arc::clone(&self.file);
        let written = spawn_blocking(move || {
            let ids: Vec<&str> = ids.iter().map(String::as_str).collect();
            file.add(&ids)
        });
        written.await.unwrap_or_else(|error| Err(Failure::failed(error.to_string())))
    }

    fn waiting(&self) -> std::sync::MutexGuard<'_, Vec<String>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
