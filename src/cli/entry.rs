//! `beeswarm entry`: striping of files and directories, through virtual extended attributes of the mount.

use super::{Answer, units};
use crate::base::start::StartError;
use crate::limits;
use rustix::fs::XattrFlags;
use rustix::io::Errno;
use std::path::Path;

/// Read: everything about an entry, as JSON.
const ENTRY: &str = "beeswarm.entry";
/// Written: the striping of new files, as JSON.
const POLICY: &str = "beeswarm.policy";

/// `beeswarm entry info PATH`.
pub fn info(path: &Path, json: bool) -> Result<Answer, StartError> {
    let what = format!("read the entry of {}", path.display());
    let text = read_attribute(path, ENTRY).map_err(|e| on_mount(&what, path, e))?;
    let value: serde_json::Value = serde_json::from_slice(&text)
        .map_err(|e| StartError::new(&what, format!("the mount's answer is not JSON: {e}"), "Mount and command must be of the same version."))?;
    if json {
        println!("{value:#}");
    } else {
        println!("path: {}", path.display());
        print_value("", &value);
    }
    Ok(Answer::Yes)
}

/// One line per leaf, names joined by dots.
fn print_value(name: &str, value: &serde_json::Value) {
    match value {
        serde_json::Value::Object(fields) => {
            for (key, value) in fields {
                let name = if name.is_empty() { key.clone() } else { format!("{name}.{key}") };
                print_value(&name, value);
            }
        }
        serde_json::Value::Null => println!("{name}: -"),
        serde_json::Value::String(text) => println!("{name}: {text}"),
        serde_json::Value::Number(n) if name.ends_with("bytes") => match n.as_u64() {
            Some(bytes) => println!("{name}: {bytes} ({})", units::format_bytes(bytes)),
            None => println!("{name}: {n}"),
        },
        other => println!("{name}: {other}"),
    }
}

/// `beeswarm entry set DIR`.
pub fn set(path: &Path, chunk_size: Option<u64>, num_targets: Option<u16>, json: bool) -> Result<Answer, StartError> {
    let what = format!("set the striping of {}", path.display());
    if chunk_size.is_none() && num_targets.is_none() {
        return Err(StartError::new(&what, "nothing to set", "Add --chunk-size SIZE or --num-targets N."));
    }
    let chunk_bytes = match chunk_size {
        None => None,
        Some(bytes) => Some(valid_chunk(bytes).ok_or_else(|| {
            StartError::new(&what, format!("chunk size {bytes} is not allowed"), "It must be a power of two from 64k to 64m.")
        })?),
    };
    let policy = serde_json::json!({ "chunk_bytes": chunk_bytes, "targets": num_targets });
    rustix::fs::setxattr(path, POLICY, policy.to_string().as_bytes(), XattrFlags::empty())
        .map_err(|e| on_mount(&what, path, e))?;
    if json {
        println!("{policy:#}");
    } else {
        let shown = [
            chunk_bytes.map(|b| format!("chunk size {}", units::format_bytes(u64::from(b)))),
            num_targets.map(|n| format!("{n} targets")),
        ];
        let shown: Vec<String> = shown.into_iter().flatten().collect();
        println!("{}: new files get {}; existing files keep theirs", path.display(), shown.join(", "));
    }
    Ok(Answer::Yes)
}

fn valid_chunk(bytes: u64) -> Option<u32> {
    let bytes = u32::try_from(bytes).ok()?;
    (bytes.is_power_of_two() && (limits::CHUNK_BYTES_MIN..=limits::CHUNK_BYTES_MAX).contains(&bytes)).then_some(bytes)
}

/// An extended attribute as a whole.
pub fn read_attribute(path: &Path, name: &str) -> Result<Vec<u8>, Errno> {
    let mut buffer = vec![0; limits::XATTR_VALUE_BYTES_MAX];
    let length = rustix::fs::getxattr(path, name, &mut buffer[..])?;
    buffer.truncate(length);
    Ok(buffer)
}

fn on_mount(what: &str, path: &Path, error: Errno) -> StartError {
    match error {
        Errno::NODATA | Errno::OPNOTSUPP => {
            StartError::new(what, "it does not lie on a mounted beeswarm", "Give a path below a mount point of beeswarm (see `mount -t fuse`).")
        }
        Errno::NOENT => StartError::new(what, "no such file or directory", format!("Check the path {}.", path.display())),
        Errno::PERM | Errno::ACCESS => StartError::new(what, "permission denied", "Only root and the owner of the directory may do this."),
        Errno::NOTDIR => StartError::new(what, "not a directory", "The striping of a file is fixed when it is created; set it on its directory."),
        other => StartError::new(what, std::io::Error::from(other), "`beeswarm health check` shows whether all servers are there."),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunk_sizes_are_powers_of_two_in_bounds() {
        assert_eq!(valid_chunk(1 << 20), Some(1 << 20));
        assert_eq!(valid_chunk(3 << 20), None);
        assert_eq!(valid_chunk(1 << 10), None);
        assert_eq!(valid_chunk(1 << 40), None);
    }

    #[test]
    fn path_outside_a_mount_is_explained() {
        let dir = tempfile::tempdir().expect("directory");
        let error = info(dir.path(), false).err().expect("not a mount");
        assert!(error.to_string().contains("mounted beeswarm"), "{error}");
    }
}
