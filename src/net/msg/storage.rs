//! Calls that storage serves. Offsets are within the chunk file (dense on each target).

use crate::base::ids::{ClientInstance, TargetId};
use crate::fs::chunkfile::{ChunkHeaderRecord, ChunkKey};
use serde::{Deserialize, Serialize};

/// Writes the payload. Creates the chunk file when it is not there.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct WriteChunkRequest {
    /// Target.
    pub target: TargetId,
    /// Data epoch of the layout under which the client writes.
    pub data_epoch: u64,
    /// Inode and data id.
    pub key: ChunkKey,
    /// For the chunk file's first write.
    pub header: ChunkHeaderRecord,
    /// Bytes.
    pub offset: u64,
}

/// Written to the server's page cache (kept over kill -9 of the server; durable after `SyncChunkRequest`).
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct WriteReply {
    /// If it differs from that of the sync, the written bytes may be lost.
    pub verifier: u64,
}

/// Reads; the payload is shorter than asked at the end of the chunk file.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ReadChunkRequest {
    /// Target.
    pub target: TargetId,
    /// Inode and data id.
    pub key: ChunkKey,
    /// Bytes.
    pub offset: u64,
    /// Bytes.
    pub length: u32,
    /// The inode says that this target holds data: then a missing chunk file is `ChunkMissing`, else an empty answer.
    pub must_exist: bool,
}

/// Changes the space of one chunk file.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum SpaceChange {
    /// Cut or extend to this size; a missing file stays missing.
    Truncate(u64),
    /// Make a hole.
    Punch {
        /// Bytes.
        offset: u64,
        /// Bytes.
        length: u64,
    },
    /// Reserve space, without growing the chunk file when `keep_size`.
    Allocate {
        /// Bytes.
        offset: u64,
        /// Bytes.
        length: u64,
        /// FALLOC_FL_KEEP_SIZE.
        keep_size: bool,
    },
}

/// Truncate, punch or allocate.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ChangeSpaceRequest {
    /// Target.
    pub target: TargetId,
    /// Data epoch under which it is ordered.
    pub data_epoch: u64,
    /// Inode and data id.
    pub key: ChunkKey,
    /// For `Allocate` on a file that is not there.
    pub header: ChunkHeaderRecord,
    /// What.
    pub change: SpaceChange,
}

/// Makes all that was written to a chunk file durable.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SyncChunkRequest {
    /// Target.
    pub target: TargetId,
    /// Inode and data id.
    pub key: ChunkKey,
}

/// Asks for size and allocation of a chunk file.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct StatChunkRequest {
    /// Target.
    pub target: TargetId,
    /// Inode and data id.
    pub key: ChunkKey,
}

/// Of a chunk file; all zero when there is none.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct StatChunkReply {
    /// Bytes.
    pub size: u64,
    /// Bytes on disk.
    pub allocated: u64,
}

/// SEEK_DATA or SEEK_HOLE within a chunk file.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SeekChunkRequest {
    /// Target.
    pub target: TargetId,
    /// Inode and data id.
    pub key: ChunkKey,
    /// From here.
    pub offset: u64,
    /// True: a hole; false: data.
    pub hole: bool,
}

/// None: no data from there to the end.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct SeekChunkReply {
    /// Bytes.
    pub offset: Option<u64>,
}

/// Deletes chunk files and leaves tombstones. Ordered by a durable record of the meta server.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PurgeRequest {
    /// Target.
    pub target: TargetId,
    /// Which.
    pub keys: Vec<ChunkKey>,
}

/// From now on, refuse data requests of these client instances. Kept over restarts.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct FenceRequest {
    /// Target.
    pub target: TargetId,
    /// Evicted sessions.
    pub clients: Vec<ClientInstance>,
}

crate::calls! { Storage;
    WriteChunkRequest -> WriteReply = 200, [Client], true, true;
    ReadChunkRequest -> () = 201, [Client], true, true;
    ChangeSpaceRequest -> WriteReply = 202, [Client, Meta], false, true;
    SyncChunkRequest -> WriteReply = 203, [Client], false, true;
    StatChunkRequest -> StatChunkReply = 204, [Client, Meta], false, true;
    SeekChunkRequest -> SeekChunkReply = 205, [Client], false, true;
    PurgeRequest -> () = 206, [Meta], false, true;
    FenceRequest -> () = 207, [Meta], false, true;
}
