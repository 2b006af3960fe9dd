//! Attributes, symbolic links, and everything about one inode.

use super::super::db::{self, Rows};
use crate::base::error::ErrorCode;
use crate::base::ids::InodeId;
use crate::fs::attr::FileKind;
use crate::net::msg::meta::{AttrReply, EntryInfoReply, LayoutRequest, OpenReply, ReadLinkReply};

/// Attributes.
pub fn getattr(db: &dyn Rows, ino: InodeId) -> Result<AttrReply, ErrorCode> {
    Ok(AttrReply { attr: db::inode(db, ino)?.attributes(ino) })
}

/// Target of a symbolic link.
pub fn readlink(db: &dyn Rows, ino: InodeId) -> Result<ReadLinkReply, ErrorCode> {
    let inode = db::inode(db, ino)?;
    if inode.kind != FileKind::Symlink {
        return Err(ErrorCode::Invalid);
    }
    Ok(ReadLinkReply { target: inode.symlink })
}

/// Layout of a file that is open already.
pub fn layout(db: &dyn Rows, r: &LayoutRequest) -> Result<OpenReply, ErrorCode> {
    let inode = db::inode(db, r.ino)?;
    Ok(OpenReply { attr: inode.attributes(r.ino), layout: inode.layout()? })
}

/// For `beeswarm entry info`.
pub fn entry_info(db: &dyn Rows, ino: InodeId) -> Result<EntryInfoReply, ErrorCode> {
    let inode = db::inode(db, ino)?;
    let mut open = (0u32, 0u32);
    for (_, o) in db::opens(db, ino)? {
        open.0 += u32::from(o.readers > 0);
        open.1 += u32::from(o.writers > 0);
    }
    Ok(EntryInfoReply {
        attr: inode.attributes(ino),
        layout: (inode.kind == FileKind::Regular).then(|| inode.layout()).transpose()?,
        policy: inode.policy(),
        open,
    })
}
