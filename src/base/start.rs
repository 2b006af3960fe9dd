//! Why a role cannot come up, in words for the person who started it.

use std::fmt;

/// What was attempted, why it failed, and what to do.
#[derive(Debug, Clone)]
pub struct StartError {
    /// What was attempted.
    pub what: String,
    /// Why it failed.
    pub why: String,
    /// What to do.
    pub todo: String,
}

impl StartError {
    /// All three parts.
    pub fn new(what: impl Into<String>, why: impl fmt::Display, todo: impl Into<String>) -> Self {
        Self { what: what.into(), why: why.to_string(), todo: todo.into() }
    }
}

impl fmt::Display for StartError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.what, self.why)?;
        if self.todo.is_empty() { Ok(()) } else { write!(f, "\n{}", self.todo) }
    }
}

impl std::error::Error for StartError {}
