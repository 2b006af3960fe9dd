//! Changes that are not in redb yet: one ordered map per table.

use super::Table;
use crate::base::ids::ClientInstance;
use std::collections::BTreeMap;

/// One changed key: its value (None: deleted) and who changed it.
#[derive(Clone, Debug)]
pub(super) struct Entry {
    pub value: Option<Vec<u8>>,
    pub session: ClientInstance,
    pub epoch: u64,
    pub sequence: u64,
}

/// A changed key of a table.
pub(super) type Row<'a> = (Table, &'a Vec<u8>, &'a Entry);

/// Changed keys of all tables.
#[derive(Default, Debug)]
pub(super) struct Overlay {
    tables: [BTreeMap<Vec<u8>, Entry>; Table::COUNT],
    pub bytes: usize,
    pub last: u64,
}

/// Rough cost of an entry beyond its key and value.
const ENTRY_BYTES: usize = 96;

impl Overlay {
    pub fn table(&self, table: Table) -> &BTreeMap<Vec<u8>, Entry> {
        &self.tables[table.index()]
    }

    pub fn get(&self, table: Table, key: &[u8]) -> Option<&Entry> {
        self.table(table).get(key)
    }

    pub fn set(&mut self, table: Table, key: Vec<u8>, entry: Entry) {
        self.last = self.last.max(entry.sequence);
        let (key_len, value_len) = (key.len(), entry.value.as_ref().map_or(0, Vec::len));
        self.bytes += value_len;
        match self.tables[table.index()].insert(key, entry) {
            Some(old) => self.bytes = self.bytes.saturating_sub(old.value.as_ref().map_or(0, Vec::len)),
            None => self.bytes += key_len + ENTRY_BYTES,
        }
    }

    /// Moves everything of a newer overlay into this one.
    pub fn absorb(&mut self, newer: Overlay) {
        for (table, map) in Table::ALL.into_iter().zip(newer.tables) {
            for (key, entry) in map {
                self.set(table, key, entry);
            }
        }
    }

    /// All changed keys.
    pub fn rows(&self) -> Vec<Row<'_>> {
        Table::ALL.into_iter().flat_map(|t| self.table(t).iter().map(move |(key, entry)| (t, key, entry))).collect()
    }

    /// Number of changed keys.
    pub fn count(&self) -> usize {
        self.tables.iter().map(BTreeMap::len).sum()
    }

    pub fn is_empty(&self) -> bool {
        self.tables.iter().all(BTreeMap::is_empty)
    }
}
