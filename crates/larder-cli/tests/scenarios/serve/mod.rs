//! The daemon as a system service: its units, its notifications to the service manager, and its behaviour when its
//! environment fails.

mod backend;
mod reload;
mod restart;
mod soak;
mod state;
mod systemd;
