//! Reads files of settings, such as the agent's.

use std::fs;
use std::path::Path;

use serde::de::DeserializeOwned;

use super::error::ConfigError;

/// Reads a text.
///
/// # Errors
/// If there is none.
pub fn read(path: &Path) -> Result<String, ConfigError> {
    fs::read_to_string(path)
        .map_err(|source| ConfigError::Unreadable { file: path.to_owned(), source })
}

/// Parses the TOML that was read from the file at `path`.
///
/// # Errors
/// If it is wrong, with the line.
pub fn parse<T: DeserializeOwned>(path: &Path, text: &str) -> Result<T, ConfigError> {
    toml::from_str(text).map_err(|error| {
        let before = error.span().and_then(|span| text.get(..span.start)).unwrap_or_default();
        ConfigError::Malformed {
            file: path.to_owned(),
            line: before.matches('\n').count() + 1,
            message: error.message().replace('\n', " "),
        }
    })
}
