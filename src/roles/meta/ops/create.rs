//! open(O_CREAT).

use super::super::db::{self, Env, RowsMut};
use super::make::{NewInode, add_inode};
use super::open;
use crate::base::error::ErrorCode;
use crate::fs::attr::FileKind;
use crate::fs::perm;
use crate::net::msg::meta::{CreateRequest, OpenReply, OpenRequest};

/// Makes the file, or opens the one that is there unless `exclusive`.
pub fn create(db: &mut dyn RowsMut, env: &Env, r: &CreateRequest) -> Result<OpenReply, ErrorCode> {
    let dir = super::directory(db, r.parent, &r.cred, perm::EXEC)?;
    if let Some(entry) = db::dentry(db, env, r.parent, &r.name)? {
        return match entry.kind {
            _ if r.exclusive => Err(ErrorCode::Exists),
            FileKind::Directory => Err(ErrorCode::IsDirectory),
            FileKind::Symlink => Err(ErrorCode::Loop),
            _ => open::open(db, env, &OpenRequest { ino: entry.ino, cred: r.cred.clone(), open: r.open }),
        };
    }
    let new = NewInode { parent: r.parent, name: &r.name, cred: &r.cred, kind: FileKind::Regular, mode: r.mode };
    let (ino, mut record) = add_inode(db, env, dir, &new, |_| Ok(()))?;
    // The mode of a file just made does not bind its maker.
    open::register(db, env.client, ino, &mut record, r.open.write)?;
    db::put_inode(db, ino, &record)?;
    Ok(OpenReply { attr: record.attributes(ino), layout: record.layout()? })
}
