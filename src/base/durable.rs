//! Files that survive a power loss: atomic replacement and directory sync.

use std::fs::File;
use std::io::{self, Write};
use std::path::Path;

/// Makes the entries of a directory durable (created, renamed and removed names).
pub fn sync_dir(dir: &Path) -> io::Result<()> {
    File::open(dir)?.sync_all()
}

/// Replaces `path` by a file with these bytes: after a crash it holds either the old or the new bytes, never a mixture.
/// Durable on return. The temporary file is `<name>.tmp` beside it; one writer per path at a time.
pub fn write_file(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let dir = match path.parent() {
        Some(p) if !p.as_os_str().is_empty() => p,
        _ => Path::new("."),
    };
    let Some(name) = path.file_name() else {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, format!("{} names no file", path.display())));
    };
    let mut temp_name = name.to_os_string();
    temp_name.push(".tmp");
    let temp = dir.join(temp_name);
    let mut file = File::create(&temp)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    std::fs::rename(&temp, path)?;
    sync_dir(dir)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn write_replaces() {
        let dir = tempfile::tempdir().unwrap();
        let p = dir.path().join("f");
        write_file(&p, b"one").unwrap();
        write_file(&p, b"two").unwrap();
        assert_eq!(std::fs::read(&p).unwrap(), b"two");
    }
}
