//! The method table: number, name, who serves it, who may call it. Numbers are never used again.

use crate::base::ids::Role;

/// One row.
#[derive(Clone, Copy, Debug)]
pub struct Method {
    /// On the wire.
    pub number: u16,
    /// For logs.
    pub name: &'static str,
    /// Who serves it.
    pub served_by: Role,
    /// Whose certificates may call it. Empty: a peer without a certificate (joining).
    pub callers: &'static [Role],
    /// Travels on the bulk stream (payload) rather than the control stream.
    pub bulk: bool,
    /// May be repeated without harm; if not, the server keeps a dedupe record under (session, slot).
    pub idempotent: bool,
}

/// Every method.
pub fn table() -> impl Iterator<Item = &'static Method> {
    use super::msg::{meta, mgmt, storage};
    mgmt::METHODS.iter().chain(meta::METHODS).chain(storage::METHODS)
}

/// The row of a number.
pub fn find(number: u16) -> Option<&'static Method> {
    table().find(|m| m.number == number)
}

/// Declares the calls of one server role: request type, reply type, number, callers, stream, repeatability.
#[macro_export]
macro_rules! calls {
    ($served:ident; $($req:ident -> $reply:ty = $number:literal, [$($caller:ident),*], $bulk:literal, $idem:literal;)*) => {
        $(impl $crate::net::rpc::Call for $req {
            type Reply = $reply;
            const METHOD: u16 = $number;
            const BULK: bool = $bulk;
        })*
        /// The methods that this role serves.
        pub const METHODS: &[$crate::net::method::Method] = &[$($crate::net::method::Method {
            number: $number, name: stringify!($req), served_by: $crate::base::ids::Role::$served,
            callers: &[$($crate::base::ids::Role::$caller),*], bulk: $bulk, idempotent: $idem,
        },)*];
    };
}

#[cfg(test)]
mod tests {
    #[test]
    fn method_numbers_are_unique() {
        let mut seen = std::collections::BTreeSet::new();
        for m in super::table() {
            assert!(seen.insert(m.number), "{} re-uses number {}", m.name, m.number);
        }
    }
}
