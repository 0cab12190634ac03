//! The OpenAPI document, generated from the routes and the types of their requests and
//! responses.

use api::ErrorBody;
use axum::handler::Handler;
use axum::http::Method;
use axum::routing::{self, MethodRouter};
use serde_json::Value;
use utoipa::openapi::extensions::ExtensionsBuilder;
use utoipa::openapi::path::{
    HttpMethod, OperationBuilder, ParameterBuilder, ParameterIn, PathItem, PathsBuilder,
};
use utoipa::openapi::request_body::RequestBodyBuilder;
use utoipa::openapi::schema::{
    ArrayBuilder, ComponentsBuilder, ObjectBuilder, OneOfBuilder, Schema, Type,
};
use utoipa::openapi::{
    Content, ContentBuilder, InfoBuilder, OpenApiBuilder, Ref, RefOr, Required, ResponseBuilder,
};
use utoipa::{IntoParams, ToSchema};

use super::caller::needed;
use super::parts::Api;

const JSON: &str = "application/json";

/// A path with one of its methods: its handler, and its part of the document.
pub(super) struct Route {
    pub(super) path: &'static str,
    pub(super) handler: MethodRouter<Api>,
    method: (HttpMethod, Method),
    operation: OperationBuilder,
    /// The schemas of all types in its requests and responses.
    schemas: Vec<(String, RefOr<Schema>)>,
}

macro_rules! methods {
    ($($name:ident $http:ident $method:ident),*) => {$(
        pub(super) fn $name<H: Handler<T, Api>, T: 'static>(
            path: &'static str,
            id: &str,
            handler: H,
        ) -> Self {
            let method = (HttpMethod::$http, Method::$method);
            Self::new(path, id, routing::$name(handler), method)
        }
    )*};
}

impl Route {
    methods!(get Get GET, post Post POST, patch Patch PATCH, delete Delete DELETE);

    fn new(
        path: &'static str,
        id: &str,
        handler: MethodRouter<Api>,
        method: (HttpMethod, Method),
    ) -> Self {
        let mut operation = OperationBuilder::new().operation_id(Some(id));
        let segments = path.split('/').filter_map(|one| one.strip_prefix('{')?.strip_suffix('}'));
        for name in segments {
            let text = ObjectBuilder::new().schema_type(Type::String);
            operation = operation.parameter(
                ParameterBuilder::new()
                    .name(name)
                    .parameter_in(ParameterIn::Path)
                    .required(Required::True)
                    .schema(Some(text)),
            );
        }
        Self { path, handler, method, operation, schemas: Vec::new() }.refuses()
    }

    pub(super) fn about(mut self, about: &str) -> Self {
        self.operation = self.operation.summary(Some(about));
        self
    }

    /// Adds the parameters of the query.
    pub(super) fn asks<T: IntoParams>(mut self) -> Self {
        self.operation =
            self.operation.parameters(Some(T::into_params(|| Some(ParameterIn::Query))));
        self
    }

    /// Adds the body of the request.
    pub(super) fn takes<T: ToSchema>(mut self) -> Self {
        let content = self.content::<T>();
        let body = RequestBodyBuilder::new().content(JSON, content).required(Some(Required::True));
        self.operation = self.operation.request_body(Some(body.build()));
        self
    }

    /// Adds the header with which a reader resumes after an event.
    pub(super) fn continues(mut self) -> Self {
        let text = ObjectBuilder::new().schema_type(Type::String);
        self.operation = self.operation.parameter(
            ParameterBuilder::new()
                .name("Last-Event-ID")
                .parameter_in(ParameterIn::Header)
                .required(Required::False)
                .description(Some("The id of the last event that the reader has"))
                .schema(Some(text)),
        );
        self
    }

    pub(super) fn answers<T: ToSchema>(mut self) -> Self {
        let content = self.content::<T>();
        self.responds("200", "The requested object", JSON, content)
    }

    /// As `answers`, for a request that creates something.
    pub(super) fn makes<T: ToSchema>(mut self) -> Self {
        let content = self.content::<T>();
        self.responds("201", "It was started", JSON, content)
    }

    pub(super) fn answers_many<T: ToSchema>(mut self) -> Self {
        let many = ArrayBuilder::new().items(self.reference::<T>());
        self.responds("200", "The requested object", JSON, content_of(many))
    }

    pub(super) fn answers_optionally<T: ToSchema>(mut self) -> Self {
        let null = ObjectBuilder::new().schema_type(Type::Null);
        let one = OneOfBuilder::new().item(null).item(self.reference::<T>());
        self.responds("200", "The requested object", JSON, content_of(one))
    }

    pub(super) fn answers_null(self) -> Self {
        let null = ObjectBuilder::new().schema_type(Type::Null);
        self.responds("200", "It will be done", JSON, content_of(null))
    }

    pub(super) fn answers_any(self) -> Self {
        let any = ObjectBuilder::new().schema_type(Type::Object);
        self.responds("200", "The requested object", JSON, content_of(any))
    }

    pub(super) fn answers_text(self, kind: &str) -> Self {
        let text = ObjectBuilder::new().schema_type(Type::String);
        self.responds("200", "The requested object", kind, content_of(text))
    }

    /// Adds a response that is a stream of values; the schema is that of one value.
    pub(super) fn streams<T: ToSchema>(mut self, kind: &str) -> Self {
        let content = self.content::<T>();
        self.responds("200", "One after the other; the schema is that of one", kind, content)
    }

    fn refuses(mut self) -> Self {
        let content = self.content::<ErrorBody>();
        self.responds("default", "The request failed: why, and what to do", JSON, content)
    }

    fn responds(mut self, status: &str, about: &str, kind: &str, content: Content) -> Self {
        let response = ResponseBuilder::new().description(about).content(kind, content);
        self.operation = self.operation.response(status, response);
        self
    }

    fn content<T: ToSchema>(&mut self) -> Content {
        content_of(self.reference::<T>())
    }

    fn reference<T: ToSchema>(&mut self) -> RefOr<Schema> {
        self.schemas.push((T::name().into_owned(), T::schema()));
        T::schemas(&mut self.schemas);
        Ref::from_schema_name(T::name()).into()
    }
}

fn content_of(schema: impl Into<RefOr<Schema>>) -> Content {
    ContentBuilder::new().schema(Some(schema)).build()
}

/// Generates the document.
pub(super) fn of(routes: Vec<Route>) -> Value {
    let mut paths = PathsBuilder::new();
    let mut components = ComponentsBuilder::new();
    for Route { path, method: (http, method), operation, schemas, .. } in routes {
        let role = needed(&method, path).to_string();
        let role = ExtensionsBuilder::new().add("x-role", role).build();
        let operation = operation.extensions(Some(role)).build();
        paths = paths.path(path, PathItem::new(http, operation));
        components = components.schemas_from_iter(schemas);
    }
    let info =
        InfoBuilder::new().title("Droveway").version(env!("CARGO_PKG_VERSION")).description(Some(
            "The API of an agent: HTTP on its unix socket and, to people and programs with a \
             certificate, over TLS. `x-role` is the role that a certificate needs.",
        ));
    let document =
        OpenApiBuilder::new().info(info).paths(paths).components(Some(components.build())).build();
    let mut document = serde_json::to_value(document).expect("all its keys are texts");
    unlink(&mut document);
    document
}

/// Removes the links of doc comments, which work only in Rust.
fn unlink(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            for (name, field) in fields {
                match field {
                    Value::String(text) if name == "description" => {
                        *text = text.replace("[`", "`").replace("`]", "`");
                    }
                    field => unlink(field),
                }
            }
        }
        Value::Array(values) => values.iter_mut().for_each(unlink),
        _ => {}
    }
}
