//! Files that survive a power loss: whole replacement, creation that never overwrites, and directory sync.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// Mode of files for their owner alone. They have it from the first instant on.
pub const SECRET: u32 = 0o600;
/// Mode of files that everybody may read.
pub const PUBLIC: u32 = 0o644;

/// Makes the entries of a directory durable (created, renamed and removed names).
pub fn sync_dir(dir: &Path) -> io::Result<()> {
    File::open(dir)?.sync_all()
}

/// Replaces `path` by a file with these bytes and this mode: after a crash it holds either the old or the new bytes, never a
/// mixture. Durable on return. The temporary file is `<name>.new` beside it; one writer per path at a time.
pub fn write_file(path: &Path, bytes: &[u8], mode: u32) -> io::Result<()> {
    let temp = write_temp(path, bytes, mode)?;
    fs::rename(&temp, path)?;
    sync_dir(parent(path))
}

/// Like `write_file`, but `AlreadyExists` if there is such a file already. Nothing is ever overwritten.
pub fn create_file(path: &Path, bytes: &[u8], mode: u32) -> io::Result<()> {
    let temp = write_temp(path, bytes, mode)?;
    // A link, not a rename: it fails when the name is taken.
    fs::hard_link(&temp, path)?;
    sync_dir(parent(path))?;
    fs::remove_file(&temp)
}

fn parent(path: &Path) -> &Path {
    path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

fn write_temp(path: &Path, bytes: &[u8], mode: u32) -> io::Result<PathBuf> {
    let Some(name) = path.file_name() else {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, format!("{} names no file", path.display())));
    };
    let mut temp_name = name.to_os_string();
    temp_name.push(".new");
    let temp = parent(path).join(temp_name);
    // A leftover may have another mode or be a second link to a finished file: removed, not written into.
    match fs::remove_file(&temp) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
        _ => {}
    }
    let mut file = OpenOptions::new().write(true).create_new(true).mode(mode).open(&temp)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    Ok(temp)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn mode_of(path: &Path) -> u32 {
        fs::metadata(path).unwrap().permissions().mode() & 0o777
    }

    #[test]
    fn write_file_replaces_and_keeps_secrets() {
        let dir = tempfile::tempdir().unwrap();
        let p = dir.path().join("f");
        write_file(&p, b"one", PUBLIC).unwrap();
        // Neither the old file's mode nor that of a leftover is taken over.
        fs::write(dir.path().join("f.new"), "leftover of a crash").unwrap();
        write_file(&p, b"two", SECRET).unwrap();
        assert_eq!((fs::read(&p).unwrap(), mode_of(&p)), (b"two".to_vec(), SECRET));
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
        assert_eq!(mode_of(&write_temp(&p, b"x", SECRET).unwrap()), SECRET);
    }

    #[test]
    fn create_file_never_overwrites() {
        let dir = tempfile::tempdir().unwrap();
        let p = dir.path().join("f");
        create_file(&p, b"one", SECRET).unwrap();
        assert_eq!(create_file(&p, b"two", PUBLIC).unwrap_err().kind(), io::ErrorKind::AlreadyExists);
        // Interrupted between link and removal: the leftover is the file itself.
        fs::remove_file(dir.path().join("f.new")).unwrap();
        fs::hard_link(&p, dir.path().join("f.new")).unwrap();
        assert!(create_file(&p, b"two", PUBLIC).is_err());
        assert_eq!((fs::read(&p).unwrap(), mode_of(&p)), (b"one".to_vec(), SECRET));
    }
}
