//! Pure rules of the file system and the chunk engine.
