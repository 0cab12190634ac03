//! Who makes a request over TCP, and what the roles permit.

use api::{MigrateRequest, VmSummary};
use axum::http::Method;
use identity::Role;
use qemu::secrets::hide_in_command_line;

use crate::denied::Denied;

/// The person or program that makes a request.
#[derive(Clone, Debug)]
pub(crate) struct Caller {
    pub(super) name: String,
    pub(super) role: Role,
}

#[cfg(test)]
impl Caller {
    pub(super) fn example(role: Role) -> Self {
        Self::named("ann", role)
    }

    pub(super) fn named(name: &str, role: Role) -> Self {
        Self { name: name.to_owned(), role }
    }
}

/// The role that a request needs: to look, to move, or anything else.
pub(super) fn needed(method: &Method, path: &str) -> Role {
    let predicts = path.strip_prefix("/v1/vms/").is_some_and(|rest| rest.ends_with("/predict"));
    let of = |what: &str| {
        path.strip_prefix(what).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    };
    let moves = of("/v1/migrations") || of("/v1/gangs") || predicts;
    match *method {
        Method::GET | Method::HEAD => Role::Observe,
        _ if moves => Role::Migrate,
        _ => Role::Admin,
    }
}

/// A VM as the caller may see it: the secrets in its command line are only for an admin, who may
/// start VMs.
pub(super) fn shown_to(caller: Option<&Caller>, mut vm: VmSummary) -> VmSummary {
    if caller.is_some_and(|caller| caller.role < Role::Admin) {
        hide_in_command_line(&mut vm.argv);
    }
    vm
}

/// Refuses options of a migration that do more than move a VM, unless the caller is an
/// admin: the command line at the destination decides which program is started there.
pub(super) fn may_migrate(caller: Option<&Caller>, request: &MigrateRequest) -> Result<(), Denied> {
    let more = [
        ("--set", !request.set.is_empty()),
        ("--incoming-qmp", request.incoming_qmp.is_some()),
        ("--overwrite-disks", request.overwrite_disks),
    ];
    match (caller, more.iter().find(|(_, asked)| *asked)) {
        (Some(Caller { name, role }), Some((flag, _))) if *role < Role::Admin => {
            Err(Denied::Forbidden(format!(
                "{flag} needs the role admin, and the certificate of {name} has {role}"
            )))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_role_for_each_route() {
        for (method, path, role) in [
            (Method::GET, "/v1/vms", Role::Observe),
            (Method::GET, "/v1/events", Role::Observe),
            (Method::GET, "/v1/migrations/1/report", Role::Observe),
            (Method::POST, "/v1/migrations", Role::Migrate),
            (Method::PATCH, "/v1/migrations/1", Role::Migrate),
            (Method::POST, "/v1/migrations/1/cancel", Role::Migrate),
            (Method::POST, "/v1/vms/web1/predict", Role::Migrate),
            (Method::GET, "/v1/gangs/g1/report", Role::Observe),
            (Method::POST, "/v1/gangs", Role::Migrate),
            (Method::POST, "/v1/gangs/g1/resume", Role::Migrate),
            (Method::POST, "/v1/gangsx", Role::Admin),
            (Method::POST, "/v1/vms/predict", Role::Admin),
            (Method::POST, "/v1/vms", Role::Admin),
            (Method::POST, "/v1/vms/attach", Role::Admin),
            (Method::DELETE, "/v1/vms/web1", Role::Admin),
            (Method::POST, "/v1/migrationsx", Role::Admin),
            (Method::POST, "/v1/whatever/comes", Role::Admin),
        ] {
            assert_eq!(needed(&method, path), role, "{method} {path}");
        }
    }

    #[test]
    fn what_is_more_than_a_move_takes_an_admin() {
        let caller = |role| Caller { name: "ann".to_owned(), role };
        let request = |more: &str| -> MigrateRequest {
            serde_json::from_str(&format!(r#"{{"vm":"v","to":"b"{more}}}"#)).unwrap()
        };
        let set = request(r#","set":["/usr/bin/qemu=/tmp/mine"]"#);
        let may = |caller: Option<&Caller>, request: &_| may_migrate(caller, request).is_ok();
        let (mover, admin) = (caller(Role::Migrate), caller(Role::Admin));
        assert!(may(Some(&mover), &request("")));
        assert!(!may(Some(&mover), &set));
        assert!(!may(Some(&mover), &request(r#","incoming_qmp":"/s""#)));
        assert!(may(Some(&admin), &set) && may(None, &set));
    }
}
