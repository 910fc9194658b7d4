//! How and when an image is pulled.
