//! Files that survive a power loss: atomic replacement, directory sync, and the lock that keeps a directory to one process.

use std::fs::{File, OpenOptions};
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

/// Takes the directory's exclusive lock (`flock` on its file `lock`) without waiting. Held as long as the returned file
/// is open; the kernel drops it when the process dies.
pub fn lock_dir(dir: &Path) -> io::Result<File> {
    let path = dir.join("lock");
    let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path)?;
    match rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(file),
        Err(rustix::io::Errno::WOULDBLOCK) => Err(io::Error::new(
            io::ErrorKind::ResourceBusy,
            format!("another process uses {} (it holds {})", dir.display(), path.display()),
        )),
        Err(e) => Err(e.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn write_replaces_and_lock_excludes() {
        let dir = tempfile::tempdir().unwrap();
        let p = dir.path().join("f");
        write_file(&p, b"one").unwrap();
        write_file(&p, b"two").unwrap();
        assert_eq!(std::fs::read(&p).unwrap(), b"two");
        let held = lock_dir(dir.path()).unwrap();
        assert!(lock_dir(dir.path()).unwrap_err().to_string().contains("another process"));
        drop(held);
        lock_dir(dir.path()).unwrap();
    }
}
