//! The daemon as a service of a machine: its units, what it tells a service manager, and what becomes of it when
//! something around it goes wrong.

mod backend;
mod reload;
mod soak;
mod state;
mod systemd;
