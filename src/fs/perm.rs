//! Permission checks, pure: mode bits, owner and group against a credential. Root passes as with CAP_DAC_OVERRIDE.

use super::attr::{Credential, FileKind};
use crate::base::error::ErrorCode;

/// Wants to read.
pub const READ: u32 = 4;
/// Wants to write.
pub const WRITE: u32 = 2;
/// Wants to execute, or to search a directory.
pub const EXEC: u32 = 1;
/// Set-user-id.
pub const S_ISUID: u32 = 0o4000;
/// Set-group-id.
pub const S_ISGID: u32 = 0o2000;
/// Sticky directory.
pub const S_ISVTX: u32 = 0o1000;
/// The bits that chmod may set.
pub const MODE_MASK: u32 = 0o7777;

/// What a check looks at.
#[derive(Clone, Copy, Debug)]
pub struct Guarded {
    /// Type.
    pub kind: FileKind,
    /// 0o7777.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
}

/// May the caller do all of `want` (bits of `READ`, `WRITE`, `EXEC`)? `AccessDenied` if not.
pub fn access(object: &Guarded, cred: &Credential, want: u32) -> Result<(), ErrorCode> {
    if cred.is_root() {
        // Execution needs one execute bit even for root; searching a directory does not.
        let exec_ok = object.kind == FileKind::Directory || object.mode & 0o111 != 0;
        return if want & EXEC == 0 || exec_ok { Ok(()) } else { Err(ErrorCode::AccessDenied) };
    }
    let granted = if cred.uid == object.uid {
        object.mode >> 6
    } else if cred.in_group(object.gid) {
        object.mode >> 3
    } else {
        object.mode
    };
    if granted & want == want { Ok(()) } else { Err(ErrorCode::AccessDenied) }
}

/// Is the caller the owner, or root?
pub fn owns(object: &Guarded, cred: &Credential) -> bool {
    cred.is_root() || cred.uid == object.uid
}

/// May the caller remove or rename `entry` in `dir`, as far as the sticky bit is concerned? `NotPermitted` if not.
pub fn sticky(dir: &Guarded, entry: &Guarded, cred: &Credential) -> Result<(), ErrorCode> {
    if dir.mode & S_ISVTX == 0 || owns(dir, cred) || owns(entry, cred) { Ok(()) } else { Err(ErrorCode::NotPermitted) }
}

/// Group and mode of something new in `dir`: the group and the bit of a set-group-id directory are inherited, and
/// nobody makes a set-group-id program of a group that he is not in.
pub fn inherit(dir: &Guarded, kind: FileKind, mode: u32, cred: &Credential) -> (u32, u32) {
    let mut mode = mode & MODE_MASK;
    if dir.mode & S_ISGID == 0 {
        return (cred.gid, mode);
    }
    if kind == FileKind::Directory {
        mode |= S_ISGID;
    } else if mode & S_ISGID != 0 && mode & 0o010 != 0 && !cred.is_root() && !cred.in_group(dir.gid) {
        mode &= !S_ISGID;
    }
    (dir.gid, mode)
}

/// The mode after a write or a change of owner: set-user-id goes, set-group-id if it is one of a program.
pub fn without_suid(mode: u32) -> u32 {
    let mode = mode & !S_ISUID;
    if mode & 0o010 != 0 { mode & !S_ISGID } else { mode }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn object(kind: FileKind, mode: u32) -> Guarded {
        Guarded { kind, mode, uid: 10, gid: 20 }
    }
    fn cred(uid: u32, gid: u32) -> Credential {
        Credential { uid, gid, groups: vec![] }
    }

    #[test]
    fn only_the_first_matching_class_counts() {
        let f = object(FileKind::Regular, 0o077);
        assert_eq!(access(&f, &cred(10, 20), READ), Err(ErrorCode::AccessDenied));
        assert_eq!(access(&f, &cred(11, 20), READ | WRITE), Ok(()));
        let f = object(FileKind::Regular, 0o707);
        assert_eq!(access(&f, &cred(11, 20), READ), Err(ErrorCode::AccessDenied));
        let member = Credential { uid: 11, gid: 1, groups: vec![20] };
        assert_eq!(access(&f, &member, READ), Err(ErrorCode::AccessDenied));
        assert_eq!(access(&f, &cred(11, 21), READ), Ok(()));
    }

    #[test]
    fn root_executes_only_what_somebody_may_execute() {
        assert!(access(&object(FileKind::Regular, 0o600), &cred(0, 0), READ | WRITE).is_ok());
        assert!(access(&object(FileKind::Regular, 0o600), &cred(0, 0), EXEC).is_err());
        assert!(access(&object(FileKind::Regular, 0o001), &cred(0, 0), EXEC).is_ok());
        assert!(access(&object(FileKind::Directory, 0), &cred(0, 0), EXEC).is_ok());
    }

    #[test]
    fn sticky_lets_owners_of_either_through() {
        let dir = Guarded { kind: FileKind::Directory, mode: 0o1777, uid: 1, gid: 1 };
        let file = object(FileKind::Regular, 0o666);
        assert!(sticky(&dir, &file, &cred(10, 0)).is_ok());
        assert!(sticky(&dir, &file, &cred(1, 0)).is_ok());
        assert!(sticky(&dir, &file, &cred(0, 0)).is_ok());
        assert_eq!(sticky(&dir, &file, &cred(2, 0)), Err(ErrorCode::NotPermitted));
    }

    #[test]
    fn setgid_is_inherited() {
        let dir = Guarded { kind: FileKind::Directory, mode: 0o2775, uid: 1, gid: 7 };
        assert_eq!(inherit(&dir, FileKind::Directory, 0o755, &cred(5, 5)), (7, 0o2755));
        assert_eq!(inherit(&dir, FileKind::Regular, 0o2755, &cred(5, 5)), (7, 0o755));
        assert_eq!(inherit(&dir, FileKind::Regular, 0o2755, &cred(5, 7)), (7, 0o2755));
        assert_eq!(without_suid(0o6755), 0o755);
        assert_eq!(without_suid(0o2745), 0o2745);
    }
}
