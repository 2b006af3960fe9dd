//! Versions of what is kept on disk. A reader looks at the version before it decodes anything else, so that what a newer
//! beeswarm wrote is told from what is damaged.

/// Versions are raised one by one: a larger number is damage, not a version.
pub const VERSION_MAX: u32 = 255;

/// What a person does about something newer.
pub const UPGRADE: &str = "upgrade beeswarm on this machine to the version that wrote it, or a later one";

/// Something was written by a newer beeswarm.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("it has version {found}, this beeswarm knows versions up to {known}")]
pub struct Newer {
    /// Its version.
    pub found: u32,
    /// The newest that this build reads.
    pub known: u32,
}

/// Why something with a version cannot be read.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Unreadable {
    /// A newer beeswarm wrote it.
    #[error("{0}; {UPGRADE}")]
    Newer(#[from] Newer),
    /// It is not what was written.
    #[error("it is damaged: {0}")]
    Damaged(String),
}

/// Looks at a version. There was none before 1, and none older than `known` until one is converted.
pub fn check(found: u32, known: u32) -> Result<(), Unreadable> {
    match found {
        _ if found == known => Ok(()),
        _ if found > known && found <= VERSION_MAX => Err(Newer { found, known }.into()),
        _ => Err(Unreadable::Damaged(format!("{found} is no version of it"))),
    }
}

/// `check` for bytes that begin with their version, two bytes little-endian.
pub fn check_u16(bytes: &[u8], known: u16) -> Result<(), Unreadable> {
    match bytes.first_chunk::<2>() {
        Some(version) => check(u32::from(u16::from_le_bytes(*version)), u32::from(known)),
        None => Err(Unreadable::Damaged(format!("it is cut short: {} bytes", bytes.len()))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn newer_is_told_from_damaged() {
        assert_eq!(check(3, 3), Ok(()));
        assert_eq!(check(255, 3), Err(Unreadable::Newer(Newer { found: 255, known: 3 })));
        assert!(
            check(4, 3).unwrap_err().to_string().contains("version 4, this beeswarm knows versions up to 3; upgrade")
        );
        for no_version in [0, 2, 256, u32::MAX] {
            assert!(matches!(check(no_version, 3), Err(Unreadable::Damaged(_))), "{no_version}");
        }
        assert!(matches!(check_u16(&[2, 0, 9], 1), Err(Unreadable::Newer(_))));
        assert!(matches!(check_u16(&[1], 1), Err(Unreadable::Damaged(_))));
    }
}
